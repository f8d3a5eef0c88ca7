"""Callbacks that are created once begin each round as a new process has them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest

from elasticjob.frameworks.callback_attributes import CallbackAttributes


class Counts:
    def __init__(self) -> None:
        self.steps = 0
        self.best: float | None = None
        self.losses: list[float] = []
        self.window: deque[float] = deque(maxlen=2)
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.file = object()

    def count(self) -> None:
        self.steps += 1
        self.best = 0.5
        self.losses.append(0.5)
        self.window.append(0.5)
        self.by_name["a"].append(1)
        self.begun = True


def test_plain_attributes_are_as_they_were_when_the_callback_was_created(caplog: pytest.LogCaptureFixture) -> None:
    attributes, callback = CallbackAttributes(), Counts()
    attributes.begin_round([callback], "do this")
    attributes.begin_round([callback], "do this")
    assert not caplog.records, "nothing has changed"

    losses, file = callback.losses, callback.file
    callback.count()
    callback.file = file = object()
    for _ in "12":
        attributes.begin_round([callback], "do this")
        new = Counts()
        names = ("steps", "best", "losses", "window", "by_name")
        assert [getattr(callback, name) for name in names] == [getattr(new, name) for name in names]
        assert not hasattr(callback, "begun")
        assert callback.window.maxlen == 2
        assert (callback.losses, callback.file) == ([], file)
        assert callback.losses is losses, "the script may hold it too"
        callback.count()
    expected = "Counts: steps, best, losses, window, by_name, begun changed in an earlier round, .*: do this"
    import re

    assert len(caplog.messages) == 2
    assert all(re.fullmatch(expected, message) for message in caplog.messages)


def test_callbacks_of_the_round_stay_as_they_are_and_are_released() -> None:
    attributes = CallbackAttributes()
    for _ in "123":
        callback: Any = Counts()
        callback.count()
        attributes.begin_round([callback], "")
        assert callback.steps == 1
    assert len(attributes.first_values) <= 2

"""Each version reads the messages of the other, as far as it knows their fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compat.versions import TODAY, VERSIONS, ask, code_of


def differences(sent: Any, read: Any, path: str) -> list[str]:
    """Return where the fields that both sides know differ."""
    if isinstance(sent, dict) and isinstance(read, dict):
        both = sent.keys() & read.keys()
        return [found for name in both for found in differences(sent[name], read[name], f"{path}.{name}")]
    if isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        return [found for a, b in zip(sent, read, strict=True) for found in differences(a, b, f"{path}[]")]
    return [] if sent == read else [f"{path}: {sent!r} was read as {read!r}"]


def conversation(sender: Path, receiver: Path) -> list[tuple[str, Any, Any]]:
    """Return name, JSON as sent and JSON as read of messages of every kind."""
    sent = ask(sender, "examples", ask(receiver, "protocol").strip())
    read = ask(receiver, "decode", stdin=sent).splitlines()
    names, texts = zip(*(line.split(" ", 1) for line in sent.splitlines()), strict=True)
    return [(name, json.loads(a), json.loads(b)) for name, a, b in zip(names, texts, read, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("to_older", [True, False], ids=["to", "from"])
def test_messages_of_every_kind_are_understood(version: str, to_older: bool) -> None:
    sides = (TODAY, code_of(version)) if to_older else (code_of(version), TODAY)
    read = conversation(*sides)
    assert {"OperatorView", "Report", "StartRound", "Termination", "InRound"} <= {name for name, _, _ in read}
    found = [text for name, sent, back in read for text in differences(sent, back, name)]
    assert not found, "\n".join(sorted(set(found)))

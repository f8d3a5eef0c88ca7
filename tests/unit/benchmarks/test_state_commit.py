"""The figures of a commit, from the lines of its script."""

from __future__ import annotations

import pytest
from benchmarks.state_commit import longer, ratio


def test_the_ratio_is_the_median_over_pairs() -> None:
    lines = [
        "first commit=1.5",
        "pair commit=0.3 memcpy=0.1",
        "pair commit=0.4 memcpy=0.2",
        "pair commit=9.0 memcpy=1.0",
    ]
    sample = ratio(["other output", *lines, "all commits measured"])
    assert sample.value == pytest.approx(3.0)
    assert sample.parts == pytest.approx({"commit, s": 0.4, "copy, s": 0.2, "first commit, s": 1.5})


def test_a_step_beside_a_commit_is_longer_by_copies() -> None:
    lines = [
        "steps alone=1.0 beside=1.1 memcpy=0.2",
        "steps alone=1.0 beside=1.4 memcpy=0.4",
        "steps alone=1.2 beside=1.1 memcpy=0.2",
    ]
    sample = longer(["other output", *lines])
    assert sample.value == pytest.approx(0.5)
    assert sample.parts == pytest.approx({"step, s": 1.0, "step beside a commit, s": 1.1, "copy, s": 0.2})

"""A short `make fuzz`: changed inputs are refused, and crash no reader."""

from __future__ import annotations

import pytest

from fuzz.__main__ import fuzz
from fuzz.targets import TARGETS, Target


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_changed_inputs_crash_no_reader(target: Target) -> None:
    result = fuzz(target, 1, inputs=150)
    assert not result.crashes, result.crashes[0]
    assert result.inputs == 150

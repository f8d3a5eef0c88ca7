"""`make soak`: which arguments it refuses."""

from __future__ import annotations

import sys

import pytest
from benchmarks import soak


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "worker killed"], "--only needs --local or --in-process"),
        (["--local", "--only", "rain"], "there is no fault 'rain'"),
        (["--in-process", "--only", "rain"], "there is no fault 'rain'"),
    ],
)
def test_a_kind_of_fault_that_would_not_be_injected_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", *arguments])
    with pytest.raises(SystemExit):
        soak.main()
    assert problem in capsys.readouterr().err

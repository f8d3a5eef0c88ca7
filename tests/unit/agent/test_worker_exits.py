"""Failures of workers: torch's error file, torchrun's report, exit codes and signals."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob.agent.monitoring.worker_exits import WorkerExit, failure_of, read_error_file, read_torchrun_report
from elasticjob.contract.messages import FailureClass


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"message": {"message": "ValueError: bad", "extraInfo": {}}}', ("ValueError", "bad")),
        ('{"message": "something else: x"}', ("", "something else: x")),
        ("{", None),
        ("[1]", None),
        ('{"message": {"message": 3}}', None),
    ],
)
def test_torchs_error_file(tmp_path: Path, content: str, expected: tuple[str, str] | None) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    found = read_error_file(str(path))
    assert (found[:2] if found else None) == expected


REPORT = """Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 8)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:09:32
  rank      : 7 (local_rank: 0)
  exitcode  : -9 (pid: 9)  (SIGKILL)
  error_file: <N/A>
=====""".splitlines()


@pytest.mark.parametrize(("lines", "expected"), [(REPORT, (7, -9)), (REPORT[:4], None), (REPORT[:7], None), ([], None)])
def test_the_root_cause_in_torchruns_report(lines: list[str], expected: tuple[int, int] | None) -> None:
    assert read_torchrun_report(lines) == expected


def test_a_failure_from_a_workers_exit() -> None:
    killed = failure_of(WorkerExit(3, -9, 1.0, lines=["a", "b"]), "pod")
    assert (killed.signal, killed.exit_code, killed.message, killed.kind) == (
        "SIGKILL",
        None,
        "a\nb",
        FailureClass.KILLED,
    )
    assert failure_of(WorkerExit(3, -9, 1.0, oom_killed=True), "pod").kind is FailureClass.OOM_KILLED
    raised = failure_of(WorkerExit(3, 1, 1.0, exception=("ValueError", "x" * 5000)), "pod")
    assert (raised.exception, len(raised.message), raised.exit_code) == ("ValueError", 1024, 1)

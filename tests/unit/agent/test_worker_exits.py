"""Failures of workers: torch's error file, torchrun's report, exit codes and signals."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob.agent.machine.outcomes import describe_failure
from elasticjob.agent.monitoring.worker_exits import (
    WorkerExit,
    failure_of,
    read_error_file,
    read_torchrun_report,
    reported_exception,
    script_succeeded,
)
from elasticjob.contract.messages import FailureClass
from elasticjob.contract.names import script_end_file


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


@pytest.mark.parametrize(
    ("code", "name", "reported"),
    [
        (1, "ValueError", True),
        (-2, "KeyboardInterrupt", True),
        (-2, "ValueError", False),
        (-9, "KeyboardInterrupt", False),
    ],
)
def test_the_last_exception_counts_if_it_ended_the_worker(code: int, name: str, reported: bool) -> None:
    assert reported_exception(code, (name, "text")) == ((name, "text") if reported else None)
    assert reported_exception(code, None) is None


@pytest.mark.parametrize(
    ("text", "suspected"), [("CUDA error: system not yet initialized", True), ("index out of range", False)]
)
def test_what_a_worker_says_of_its_device_is_only_a_suspicion(text: str, suspected: bool) -> None:
    failure = failure_of(WorkerExit(rank=0, code=1, time=1.0, exception=("RuntimeError", text)), "job-0-0")
    assert (failure.kind is FailureClass.DEVICE_UNHEALTHY, failure.suspected) == (suspected, suspected)


def test_only_the_process_that_recorded_its_success_has_succeeded(tmp_path: Path) -> None:
    error_file = str(tmp_path / "error.json")
    assert not script_succeeded(error_file, 17)
    Path(script_end_file(error_file)).write_text("17")
    assert script_succeeded(error_file, 17)
    assert not script_succeeded(error_file, 1), "a shell that ran several scripts"


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


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ([], ""),
        (["", "a", "  ", "b  "], "a\nb"),
        ([f"step {n}" for n in range(20)], "\n".join(f"step {n}" for n in range(15, 20))),
        (["x" * 300, "y" * 300], "y" * 300),
        (["z" * 600], "z" * 500),
    ],
    ids=["none", "blank lines", "many lines", "long lines", "one very long line"],
)
def test_the_message_of_a_death_without_an_exception_is_the_end_of_standard_error(
    stderr: list[str], message: str
) -> None:
    failure = failure_of(WorkerExit(3, 3, 1.0, lines=stderr, output=["step 7, loss 0.1"]), "pod")
    assert (failure.message, failure.exception) == (message, "")
    assert describe_failure(failure) == "rank 3 died: exit 3 (UserError)"


def test_a_death_is_classified_by_all_lines_and_by_standard_output_where_there_are_no_others() -> None:
    cause = "[rank0] Watchdog caught collective operation timeout"
    stderr = [cause, *(f"frame {n}" for n in range(10))]
    first = failure_of(WorkerExit(3, -6, 1.0, lines=stderr), "pod")
    assert (first.kind, cause in first.message) == (FailureClass.COLLECTIVE_FAILED, False)
    assert failure_of(WorkerExit(3, -6, 1.0, output=stderr), "pod").kind is FailureClass.COLLECTIVE_FAILED
    assert failure_of(WorkerExit(3, -6, 1.0, lines=["a"], output=stderr), "pod").kind is FailureClass.USER_ERROR


def test_a_program_that_did_not_start_is_named() -> None:
    failure = failure_of(WorkerExit(0, 127, 1.0, lines=["bash: line 1: trian: command not found"]), "pod")
    expected = "rank 0 did not start: bash: line 1: trian: command not found (exit 127, StartError)"
    assert describe_failure(failure) == expected

"""Failures of workers: torch's error file, torchrun's report, exit codes and signals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.exits.worker_exits import (
    WorkerExit,
    failure_of,
    left_at,
    read_error_file,
    read_torchrun_report,
    reported_exception,
    script_succeeded,
)
from elasticjob._runtime.agent.state_machine.endings.outcomes import describe_failure
from elasticjob._runtime.contract.failures.failure_text import (
    describe_out_of_memory,
    describe_worker_failure,
    failure_reason,
)
from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import script_returned_file, success_recorded_file
from elasticjob._runtime.system.code_root import OWN_PACKAGE


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"message": {"message": "ValueError: bad", "extraInfo": {}}}', ("ValueError", "bad")),
        ('{"message": "something else: x"}', ("", "something else: x")),
        ("{", None),
        ("[1]", None),
        ('{"message": {"message": 3}}', None),
        ('{"message":' * 100_000, None),
        ('{"message": ' + "1" * 5000 + "}", None),
    ],
)
def test_torchs_error_file(tmp_path: Path, content: str, expected: tuple[str, str] | None) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    found = read_error_file(str(path))
    assert ((found.name, found.text) if found else None) == expected


TRACE = f"""Traceback (most recent call last):
  File "/app/train.py", line 30, in <module>
    main()
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/train.py", line 30, in <module>
    main()
  File "/app/lib/model.py", line 12, in forward
    return torch.relu(x)
  File "{OWN_PACKAGE}training/state.py", line 5, in commit
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 1, in relu
ValueError: bad
"""


@pytest.mark.parametrize(
    ("trace", "text", "message"),
    [
        (TRACE, "bad", "bad (model.py, line 12)"),
        (TRACE, "bad\nsecond line", "bad (model.py, line 12)\nsecond line"),
        (TRACE, "", "ValueError (model.py, line 12)"),
        (TRACE, "\n", "ValueError (model.py, line 12)"),
        (TRACE, "\nsecond line", "ValueError (model.py, line 12)\nsecond line"),
        ("", "", "ValueError"),
        (
            '  File "/app/train.py", line 2\n    def f(:\n',
            "invalid syntax (train.py, line 2)",
            "invalid syntax (train.py, line 2)",
        ),
        (
            'Traceback (most recent call last):\n  File "<string>", line 3, in <module>\n',
            "bad",
            "bad (<string>, line 3)",
        ),
        ('Traceback (most recent call last):\n  File "<frozen runpy>", line 3, in f\n', "bad", "bad"),
        ("", "bad", "bad"),
    ],
    ids=[
        "user's code",
        "many lines",
        "no text",
        "blank",
        "blank line",
        "nothing",
        "named already",
        "-c",
        "no user's code",
        "no traceback",
    ],
)
def test_the_message_of_an_exception_names_the_innermost_place_in_the_users_code(
    tmp_path: Path, trace: str, text: str, message: str
) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": f"ValueError: {text}", "extraInfo": {"py_callstack": trace}}}))
    found = read_error_file(str(path))
    assert found is not None
    end = WorkerExit(0, 1, 1.0, exception=(found.name, found.text), place=found.place)
    failure = failure_of(end, "pod")
    assert failure.message == message
    assert describe_worker_failure(failure).count("ValueError") == 1


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (WorkerExit(0, -9, 1.0, memory_limit=300 << 20), describe_out_of_memory("300Mi")),
        (WorkerExit(0, -9, 1.0, memory_limit=(300 << 20) + 1), describe_out_of_memory("314572801")),
        (WorkerExit(0, -9, 1.0, lines=["step 3"], memory_limit=8 << 30), describe_out_of_memory("8Gi") + "\nstep 3"),
        (WorkerExit(0, -9, 1.0), describe_out_of_memory()),
        (WorkerExit(0, -9, 1.0, memory_limit=0), describe_out_of_memory(unlimited=True)),
    ],
)
def test_a_worker_that_ran_out_of_memory_says_so(end: WorkerExit, message: str) -> None:
    failure = failure_of(replace(end, oom_killed=True), "bert-0-0")
    assert (failure.message, failure_reason(failure)) == (message, "OOMKilled")
    assert describe_worker_failure(failure) == f"rank 0 in bert-0-0 failed: {message.splitlines()[0]}"


@pytest.mark.parametrize(
    ("content", "expected"), [("17 2.5", 2.5), ("18 2.5", None), ("17", None), ("17 x", None), (None, None)]
)
def test_when_a_script_ended(tmp_path: Path, content: str | None, expected: float | None) -> None:
    error_file = str(tmp_path / "error.json")
    if content is not None:
        Path(script_returned_file(error_file)).write_text(content)
    assert left_at(error_file, 17) == expected


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
    Path(success_recorded_file(error_file)).write_text("17")
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
    assert (describe_failure(failure) == "rank 3 died: exit 3 (UserError)") == (not message)


@pytest.mark.parametrize(
    ("code", "stderr", "described"),
    [
        (3, ["no data in /data", "", "----"], "rank 3 died: exit 3: no data in /data (UserError)"),
        (3, ["x" * 200], f"rank 3 died: exit 3: {'x' * 117}... (UserError)"),
        (3, [], "rank 3 died: exit 3 (UserError)"),
        (-11, ["step 7"], "rank 3 died: SIGSEGV (UserError)"),
    ],
    ids=["a line", "a long line", "none", "signal"],
)
def test_the_agents_log_quotes_what_a_worker_said_last_before_it_exited(
    code: int, stderr: list[str], described: str
) -> None:
    assert describe_failure(failure_of(WorkerExit(3, code, 1.0, lines=stderr), "pod")) == described


def test_a_death_is_classified_by_all_lines_and_by_standard_output_where_there_are_no_others() -> None:
    cause = "[rank0] Watchdog caught collective operation timeout"
    stderr = [cause, *(f"frame {n}" for n in range(10))]
    first = failure_of(WorkerExit(3, -6, 1.0, lines=stderr), "pod")
    assert (first.kind, cause in first.message) == (FailureClass.COLLECTIVE_FAILED, False)
    assert failure_of(WorkerExit(3, -6, 1.0, output=stderr), "pod").kind is FailureClass.COLLECTIVE_FAILED
    assert failure_of(WorkerExit(3, -6, 1.0, lines=["a"], output=stderr), "pod").kind is FailureClass.USER_ERROR


@pytest.mark.parametrize(
    ("exception", "text", "explained"),
    [
        ("DistStoreError", "wait timeout after 60000ms, keys: /default_pg/0//cuda//0", True),
        ("DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (n, 1).", True),
        ("RuntimeError", "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection timed out", True),
        ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.", False),
        ("ValueError", "wait timeout after all", False),
    ],
)
def test_ranks_that_do_not_meet_in_time_are_explained(exception: str, text: str, explained: bool) -> None:
    failure = failure_of(WorkerExit(0, 1, 1.0, exception=(exception, text)), "bert-0-0")
    described = describe_worker_failure(failure)
    assert described.startswith(f"rank 0 in bert-0-0 failed: {exception}: {text}")
    assert ("not all ranks met in time" in described) == explained


def test_a_program_that_did_not_start_is_named() -> None:
    failure = failure_of(WorkerExit(0, 127, 1.0, lines=["bash: line 1: trian: command not found"]), "pod")
    expected = "rank 0 did not start: bash: line 1: trian: command not found (exit 127, StartError)"
    assert describe_failure(failure) == expected

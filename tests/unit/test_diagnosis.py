"""Failure classes and root causes, from real exit codes, signals, kernel counters and messages of torch."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.exits.worker_exits import OomCounter, WorkerExit, failure_of
from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.diagnosis import classify, own_file, place_of, root_cause
from elasticjob._runtime.system.code_root import OWN_PACKAGE

USER, OOM, KILLED = FailureClass.USER_ERROR, FailureClass.OOM_KILLED, FailureClass.KILLED
PEER, START, DEVICE = FailureClass.COLLECTIVE_FAILED, FailureClass.START_ERROR, FailureClass.DEVICE_UNHEALTHY

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, "
WATCHDOG = (
    "[rank1]:[E ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
)
CONNECTED = "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
DATA_LOADER = "DataLoader worker (pid 71) is killed by signal: Killed. "

ENDS: list[tuple[str, int | None, str, str, str, FailureClass]] = [
    ("an exception", 1, "", "ValueError", "bad batch", USER),
    ("an exit code", 3, "", "", "giving up", USER),
    ("a crash", None, "SIGSEGV", "", "", USER),
    ("a failed assertion in C", None, "SIGABRT", "", "double free or corruption (out)", USER),
    ("CUDA out of memory", 1, "", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB.", USER),
    ("an assertion on the device", 1, "", "AcceleratorError", "CUDA error: device-side assert triggered", USER),
    ("another host is down", 1, "", "ConnectionRefusedError", "[Errno 111] Connection refused", USER),
    ("broken pipe of the script", 1, "", "BrokenPipeError", "[Errno 32] Broken pipe", USER),
    ("gloo's connection message last", 3, "", "", CONNECTED, USER),
    ("ranks share a device", 1, "", "DistBackendError", NCCL + "ncclInvalidUsage ... Duplicate GPU detected", USER),
    ("no memory for NCCL", 1, "", "DistBackendError", NCCL + "ncclUnhandledCudaError: Call to CUDA function", USER),
    ("killed", None, "SIGKILL", "", "", KILLED),
    ("killed after gloo's connection message", None, "SIGKILL", "", CONNECTED, KILLED),
    ("raised, then killed during its exit", None, "SIGKILL", "ValueError", "bad batch", USER),
    ("lost a peer, then terminated", None, "SIGTERM", "RuntimeError", GLOO + "pair.cc:561] Connection closed", PEER),
    ("terminated", None, "SIGTERM", "", "", KILLED),
    ("interrupted", None, "SIGINT", "KeyboardInterrupt", "", KILLED),
    ("gloo: closed", 1, "", "RuntimeError", GLOO + "pair.cc:561] Connection closed by peer [10.0.0.2]:34225.", PEER),
    ("gloo: reset", 1, "", "RuntimeError", GLOO + "pair.cc:534] Read error [10.0.0.2]:1: Connection reset", PEER),
    ("gloo: timeout", 1, "", "RuntimeError", GLOO + "unbound_buffer.cc:78] Timed out waiting 4000ms for recv", PEER),
    ("gloo: no mesh", 1, "", "RuntimeError", "Gloo connectFullMesh failed with [x] timed out connecting", PEER),
    ("NCCL: peer failed", 1, "", "DistBackendError", NCCL + "ncclRemoteError: A call failed possibly due to", PEER),
    ("NCCL: aborted", 1, "", "DistBackendError", "NCCL communicator was aborted on rank 1. ", PEER),
    ("NCCL: watchdog", None, "SIGABRT", "", WATCHDOG, PEER),
    ("the round's store closed", 1, "", "DistNetworkError", "Failed to recv, got 0 bytes.", PEER),
    ("the round's store never set the key", 1, "", "DistStoreError", "wait timeout after 300000ms, keys: /x", PEER),
    ("no such program", 127, "", "", "bash: trian: command not found", START),
    ("not executable", 126, "", "", "", START),
    ("no such script", 2, "", "", "python3: can't open file '/app/trian.py': [Errno 2] No such file", START),
    ("wrong flags", 2, "", "", "train.py: error: unrecognized arguments: --lrr", USER),
    ("memory errors", 1, "", "AcceleratorError", "CUDA error: uncorrectable ECC error encountered", DEVICE),
    ("NVLink", 1, "", "AcceleratorError", "CUDA error: uncorrectable NVLink error detected", DEVICE),
    ("no fabric manager", 1, "", "RuntimeError", "CUDA error: system not yet initialized", DEVICE),
    ("within NCCL", 1, "", "DistBackendError", NCCL + "Cuda failure 'uncorrectable ECC error encountered'", DEVICE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "signal", "exception", "message", "kind"), ENDS, ids=[e[0] for e in ENDS])
def test_the_class_of_a_failure(
    name: str, code: int | None, signal: str, exception: str, message: str, kind: FailureClass
) -> None:
    assert classify(code, signal, exception, message) is kind


@pytest.mark.parametrize(
    ("code", "exception", "kind"),
    [(-9, None, OOM), (1, ("RuntimeError", DATA_LOADER), OOM), (1, ("ValueError", "bad"), USER), (-15, None, KILLED)],
    ids=["killed", "its data loader killed", "raised", "terminated"],
)
def test_an_oom_kill_is_recognized(code: int, exception: tuple[str, str] | None, kind: FailureClass) -> None:
    assert failure_of(WorkerExit(0, code, 1.0, exception, oom_killed=True), "pod").kind is kind


V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 12\noom {0}\noom_kill {0}\noom_group_kill 0\n"


@pytest.mark.parametrize("events", [V1, V2], ids=["v1", "v2"])
def test_each_oom_kill_accounts_for_one_failure(tmp_path: Path, events: str) -> None:
    file = tmp_path / "events"
    file.write_text(events.format(4))
    counter = OomCounter([str(tmp_path / "absent"), str(file)])
    assert not counter.unclaimed
    file.write_text(events.format(6))
    claimed = 0
    while counter.unclaimed:
        counter.claim()
        claimed += 1
    assert claimed == 2
    file.write_text(events.format(7))
    counter.reset()
    assert not counter.unclaimed


def test_without_the_kernels_counter_no_failure_is_an_oom_kill(tmp_path: Path) -> None:
    assert not OomCounter([str(tmp_path / "absent")]).unclaimed


def failure(kind: FailureClass, pod: str) -> Failure:
    return Failure(kind, pod, 1.0, rank=0)


def test_the_root_cause_is_the_first_failure_that_is_not_a_failed_collective() -> None:
    collectives = (failure(PEER, "a"), failure(PEER, "b"))
    cause = failure(KILLED, "c")
    for order in permutations((*collectives, cause)):
        assert root_cause(order) == cause
    assert root_cause((cause, failure(USER, "d"))) == cause
    assert root_cause(collectives) == collectives[0]
    assert root_cause(()) is None


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (f"{OWN_PACKAGE}training/state.py", "training/state.py"),
        ("/opt/venv/lib/python3.11/site-packages/elasticjob/inprocess/abort.py", "inprocess/abort.py"),
        ("/usr/lib/python3/dist-packages/elasticjob/data/step_plan.py", "data/step_plan.py"),
        ("/home/me/elasticjob/training/train.py", ""),
        ("/app/elasticjob/data/load.py", ""),
    ],
)
def test_a_folder_of_the_user_that_is_named_like_the_package_is_not_taken_for_it(path: str, own: str) -> None:
    assert own_file(path) == own
    place = place_of(f'  File "{path}", line 3, in main')
    assert place == ("" if own else f"{path.rpartition('/')[2]}, line 3")

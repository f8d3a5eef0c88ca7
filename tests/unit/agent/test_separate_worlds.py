"""Which processes below a worker belong to another world, by what the kernel shows, and which of them check that."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticjob._runtime.agent.monitoring.exits.worker_exits import read_error_file
from elasticjob._runtime.agent.workers import separate_worlds
from elasticjob._runtime.agent.workers.processes.process_table import ProcessTable
from elasticjob._runtime.agent.workers.processes.worker_process import RUNNING
from elasticjob._runtime.agent.workers.separate_worlds import (
    SeparateProcess,
    SeparateWorlds,
    find_separate_processes,
    separate_rank,
)
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS

WORLD = "LOCAL_RANK=1 RANK=3 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=5"
OTHER = {"ELASTICJOB_WORLD": WORLD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "PYTHONPATH": "."}
PATCHED = {**OTHER, "PYTHONPATH": f".:{CODE_ROOT}/{IN_WORKERS}"}
TRAIN = ["/venv/bin/python3", "-u", "train.py"]


@pytest.mark.parametrize(
    ("environment", "argv"),
    [
        (OTHER, TRAIN),
        ({**OTHER, "RANK": "3"}, TRAIN),
        ({**OTHER, "WORLD_SIZE": "8"}, ["python", "-W", "ignore", "-m", "x"]),
        (PATCHED, ["python", "-I", "train.py"]),
        (PATCHED, ["python", "-uS", "-X", "dev", "train.py"]),
    ],
)
def test_a_rank_of_another_world_whose_python_checks_nothing(environment: dict[str, str], argv: list[str]) -> None:
    found = separate_rank(environment, argv)
    assert found is not None
    assert (found.port, found.assigned) == (29500, "rank 3 of 8")
    assert f"as rank {environment['RANK']} of {environment['WORLD_SIZE']}" in found.message


@pytest.mark.parametrize(
    ("environment", "argv"),
    [
        ({**OTHER, "RANK": "3", "WORLD_SIZE": "8"}, TRAIN),
        ({**OTHER, "ALLOW_SEPARATE_WORLDS": "1"}, TRAIN),
        ({**OTHER, "ELASTICJOB_TRAINS": "7"}, TRAIN),
        ({**OTHER, "MASTER_PORT": ""}, TRAIN),
        ({name: value for name, value in OTHER.items() if name != "ELASTICJOB_WORLD"}, TRAIN),
        ({}, []),
        (PATCHED, TRAIN),
        (PATCHED, ["python", "-W", "Ignore", "-X", "SEI", "train.py"]),
        (PATCHED, ["nvidia-smi"]),
    ],
)
def test_a_process_of_the_round_or_one_that_checks_itself(environment: dict[str, str], argv: list[str]) -> None:
    assert separate_rank(environment, argv) is None


HAS_TORCH = """
import mmap, os, sys
file = open(sys.argv[1])
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(os.getpid(), flush=True)
sys.stdin.read()
"""
MPIRUN = '#!/bin/sh\n"$@"\nexit $?\n'


@contextmanager
def below_mpirun(folder: Path, library: str = "libtorch.so", **environment: str) -> Iterator[int]:
    """Run a program that has loaded a library below mpirun; yield its process id."""
    (folder / "mpirun").write_text(MPIRUN)
    (folder / "mpirun").chmod(0o755)
    (folder / library).write_text("x")
    command = [str(folder / "mpirun"), sys.executable, "-S", "-c", HAS_TORCH, str(folder / library)]
    env = {"ELASTICJOB_WORLD": WORLD, **environment}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate()


def test_a_program_with_torch_below_a_launcher_that_is_refused(tmp_path: Path) -> None:
    with below_mpirun(tmp_path) as pid:
        (found,) = find_separate_processes(())
        assert (found.pid, found.local_rank) == (pid, 1)
        assert found.message.startswith("mpirun starts ranks of its own")
        assert "spec.nprocPerNode" in found.message


@pytest.mark.parametrize(
    ("library", "environment"),
    [
        ("libtokenizers.so", {}),
        ("libtorch.so", {"OMPI_COMM_WORLD_SIZE": "1"}),
        ("libtorch.so", {"ALLOW_SEPARATE_WORLDS": "1"}),
        ("libtorch.so", {"ELASTICJOB_TRAINS": "7"}),
        ("libtorch.so", {"ELASTICJOB_WORLD": ""}),
    ],
    ids=["no torch", "one process", "meant", "below a rank that trains", "no worker"],
)
def test_what_a_launcher_may_run_below_a_worker(library: str, environment: dict[str, str], tmp_path: Path) -> None:
    with below_mpirun(tmp_path, library, **environment):
        assert find_separate_processes(()) == []


class Pod:
    """The worker of local rank 1, whose process sleeps, and what a search finds."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.table = ProcessTable()
        self.worker = Worker(RoundId(1, 0, 1), 1, 3, str(folder / "error.json"), "", cast(Any, ()), cast(Any, ()))
        self.table.add(self.process.pid, self.worker, RUNNING)
        self.worlds = SeparateWorlds(self.table, set())

    def find(self, _: object = ()) -> list[SeparateProcess]:
        return [SeparateProcess(self.process.pid, "", 1, "mpirun starts ranks of its own")]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    pod.process.kill()
    pod.process.wait()


def test_the_event_loop_goes_on_while_proc_is_read(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_goes_on = threading.Event()

    def search(without: object) -> list[SeparateProcess]:
        assert loop_goes_on.wait(20)
        return pod.find()

    async def run() -> None:
        asyncio.get_running_loop().call_soon(loop_goes_on.set)
        await pod.worlds.end_workers()

    monkeypatch.setattr(separate_worlds, "find_separate_processes", search)
    asyncio.run(run())
    assert pod.process.wait(20) == -signal.SIGKILL
    assert "mpirun starts ranks" in str(read_error_file(pod.worker.error_file))


def test_a_worker_of_the_next_round_is_not_ended_for_what_was_found_before(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(without: object) -> list[SeparateProcess]:
        pod.table.set_worker(pod.process.pid, replace(pod.worker, round=RoundId(1, 0, 2)))
        return pod.find()

    monkeypatch.setattr(separate_worlds, "find_separate_processes", search)
    asyncio.run(pod.worlds.end_workers())
    assert pod.process.poll() is None
    assert not Path(pod.worker.error_file).exists()


def test_an_error_of_the_search_reaches_who_has_started_it(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(without: object) -> list[SeparateProcess]:
        raise ZeroDivisionError

    monkeypatch.setattr(separate_worlds, "find_separate_processes", search)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(pod.worlds.end_workers())

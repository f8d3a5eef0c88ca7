"""The store may die, as a real process: training does not notice, and the next failure still recovers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob.contract.names import Env
from support.local_run import LocalRun, manifest
from support.processes import child_with, environ_of, state_of

STEPS = """
import itertools, os, sys, time
for step in itertools.count():
    print("step", step, "rank", os.environ["RANK"], "pid", os.getpid(), flush=True)
    time.sleep(0.05)
    if os.path.exists(sys.argv[1]):
        break
"""


def job(folder: Path, **spec: Any) -> dict[str, object]:
    (folder / "steps.py").write_text(STEPS)
    return manifest([sys.executable, str(folder / "steps.py"), str(folder / "done")], replicas=2, **spec)


def workers(run: LocalRun) -> dict[str, int]:
    """Pids by rank, of workers that have just taken a step."""
    pids = dict[str, int]()
    while len(pids) < 2:
        told = run.wait_for(r"step \d+ rank (\d) pid (\d+)")
        pids[told[1]] = int(told[2])
    return pids


def kill_store() -> int:
    """SIGKILL; its port."""
    store = child_with("store")
    port = int(environ_of(store)[Env.PORT])
    os.kill(store, signal.SIGKILL)
    return port


def joined(run: LocalRun) -> None:
    """Both nodes have found the store again."""
    for _ in range(2):
        run.wait_for(r"\[agent\] toy-\d-0: joined")


def steps_of(text: str, pid: int) -> list[int]:
    return [int(step) for step in re.findall(rf"step (\d+) rank \d pid {pid}$", text, re.MULTILINE)]


def recovers_from_a_dead_worker(run: LocalRun, folder: Path) -> None:
    os.kill(workers(run)["1"], signal.SIGKILL)
    run.wait_for(r"runs: 2 workers on 2 nodes")
    (folder / "done").touch()
    assert run.exit_code() == 0
    assert "toy succeeded; 1 restarts" in run.text


def test_a_store_killed_twice_is_not_noticed_and_the_next_failure_recovers(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        joined(run)
        run.wait_for("runs: 2 workers on 2 nodes")
        before = workers(run)
        for _ in range(2):
            kill_store()
            joined(run)
        assert workers(run) == before
        assert run.text.count("formed") == 2  # one line for each node: no round but the first
        for pid in before.values():
            steps = steps_of(run.text, pid)
            assert steps == list(range(len(steps)))
        recovers_from_a_dead_worker(run, tmp_path)


def _bound(port: int) -> socket.socket:
    """Before the next store is there: an interpreter takes longer to start than a kernel to clear away."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_server(("", port))
        except OSError:
            assert time.monotonic() < deadline, f"somebody else serves on {port}"


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Nobody serves here: who connects is hung up on, and no store can bind it."""
    with _bound(port) as sock:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        yield
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_store_that_is_away_for_a_while_is_not_noticed_and_the_next_failure_recovers(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        joined(run)
        run.wait_for("runs: 2 workers on 2 nodes")
        before = workers(run)
        with taken(kill_store()):
            for _ in range(5):  # it is started again and again, and cannot serve
                run.wait_for("the store ended")
            assert workers(run) == before
        joined(run)
        assert "cut off" not in run.text
        recovers_from_a_dead_worker(run, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")
def test_nodes_that_are_cut_off_freeze_their_workers_and_end_them_when_told(tmp_path: Path) -> None:
    """A network namespace of the run's own, in which for a while no packet arrives."""
    rules = {"keepAliveIntervalSeconds": 1, "keepAliveMaxAttempts": 1}
    network = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]
    with LocalRun(job(tmp_path, rendezvous=rules), tmp_path, within=network) as run:
        joined(run)
        run.wait_for("runs: 2 workers on 2 nodes")
        before = workers(run)
        packets = ["nsenter", f"--net=/proc/{run.pid}/ns/net", "iptables"]
        subprocess.run([*packets, "-A", "INPUT", "-p", "tcp", "-j", "DROP"], check=True)
        for _ in range(2):
            run.wait_for("cut off from the store and from all other nodes: the workers are frozen")
        assert [state_of(pid) for pid in before.values()] == ["T", "T"]
        subprocess.run([*packets, "-F", "INPUT"], check=True)
        run.wait_for(r"round 1.0.2 runs: 2 workers on 2 nodes")
        after = workers(run)
        assert not set(after.values()) & set(before.values())
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
        assert "toy succeeded; 0 restarts" in run.text

"""Loss of the store, as a real process: training does not notice, and the job recovers from the next failure."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Env
from support.common.processes import child_with, environ_of, state_of
from support.local.partition import OWN_NETWORK
from support.local.run import LocalRun, manifest

OUTAGE = float(os.environ.get("ELASTICJOB_OUTAGE_SECONDS", "5"))
"""Seconds for which the store is unavailable."""

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
    """Return the process ids of workers that have just taken a step, by rank."""
    pids = dict[str, int]()
    while len(pids) < 2:
        line = run.wait_for(r"step \d+ rank (\d) pid (\d+)")
        pids[line[1]] = int(line[2])
    return pids


def kill_store() -> int:
    """Send the store SIGKILL; return its port."""
    store = child_with("store")
    port = int(environ_of(store)[Env.PORT])
    os.kill(store, signal.SIGKILL)
    return port


def wait_until_connected(run: LocalRun) -> None:
    """Wait until both nodes have connected to a store."""
    for _ in range(2):
        run.wait_for(r"\[agent\] toy-\d-0: connected to store")


def steps_of(text: str, pid: int) -> list[int]:
    return [int(step) for step in re.findall(rf"step (\d+) rank \d pid {pid}$", text, re.MULTILINE)]


def wait_until_stopped(pid: int) -> None:
    """Wait until the process is stopped: the kernel handles the signal after `kill` has returned."""
    deadline = time.monotonic() + 10
    while state_of(pid) != "T":
        assert time.monotonic() < deadline, f"{pid} is {state_of(pid)}"


def wait_until_the_round_has_ended() -> None:
    """Wait for the store's own log: it has no link left. A node that comes back before that goes on with the round."""
    log, deadline = Path(f"/proc/{child_with('store')}/fd/1"), time.monotonic() + 30
    while "round 1.0.1 ends (" not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def check_recovery_from_a_killed_worker(run: LocalRun, folder: Path) -> None:
    os.kill(workers(run)["1"], signal.SIGKILL)
    run.wait_for(r"runs: 2 workers on 2 pods")
    (folder / "done").touch()
    assert run.exit_code() == 0
    assert "toy succeeded; 1 restart" in run.text


def test_a_store_killed_twice_is_not_noticed_and_the_next_failure_recovers(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        wait_until_connected(run)
        run.wait_for("runs: 2 workers on 2 pods")
        before = workers(run)
        for _ in range(2):
            kill_store()
            wait_until_connected(run)
        assert workers(run) == before
        assert run.text.count("formed") == 2  # one line for each node: no round but the first
        for pid in before.values():
            steps = steps_of(run.text, pid)
            assert steps == list(range(len(steps)))
        check_recovery_from_a_killed_worker(run, tmp_path)


def _bound(port: int) -> socket.socket:
    """Bind the port before the next store does: the kernel frees it faster than an interpreter starts."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_server(("", port))
        except OSError:
            assert time.monotonic() < deadline, f"another process serves on {port}"


@contextlib.contextmanager
def occupied(port: int) -> Iterator[None]:
    """Occupy a port, so that no store can bind it, and close every connection to it."""
    with _bound(port) as sock:

        def close_connections() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock.accept()[0].close()

        thread = threading.Thread(target=close_connections)
        thread.start()
        yield
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextlib.contextmanager
def failing(run: LocalRun) -> Iterator[None]:
    """The store is started again and again, and cannot bind its port."""
    with occupied(kill_store()):
        run.wait_for("the store ended")
        yield
    wait_until_connected(run)


@contextlib.contextmanager
def stopped(run: LocalRun) -> Iterator[None]:
    """The store is stopped: its connections stay open, and it does not answer."""
    store = child_with("store")
    os.kill(store, signal.SIGSTOP)
    yield
    os.kill(store, signal.SIGCONT)


@pytest.mark.parametrize("unavailable", [failing, stopped])
def test_an_unavailable_store_is_not_noticed_and_the_next_failure_recovers(
    unavailable: Callable[[LocalRun], contextlib.AbstractContextManager[None]], tmp_path: Path
) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        wait_until_connected(run)
        run.wait_for("runs: 2 workers on 2 pods")
        before = workers(run)
        with unavailable(run):
            end = time.monotonic() + OUTAGE
            while time.monotonic() < end:
                assert workers(run) == before
        assert "cut off" not in run.text
        check_recovery_from_a_killed_worker(run, tmp_path)


def test_a_worker_that_fails_after_the_store_failed_twice_is_restarted_and_counted_once(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        wait_until_connected(run)
        run.wait_for("runs: 2 workers on 2 pods")
        kill_store()
        wait_until_connected(run)
        with occupied(kill_store()):
            os.kill(workers(run)["1"], signal.SIGKILL)
            run.wait_for("rank 1 died: SIGKILL")
        run.wait_for(r"round 1\.0\.2000001 runs: 2 workers on 2 pods")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
        assert "toy succeeded; 1 restart" in run.text


def freeze_by_cutting_off(run: LocalRun, packets: list[str]) -> dict[str, int]:
    """Drop all packets of the run until the workers of both nodes are frozen; return their process ids by rank."""
    wait_until_connected(run)
    run.wait_for("runs: 2 workers on 2 pods")
    before = workers(run)
    subprocess.run([*packets, "-A", "INPUT", "-p", "tcp", "-j", "DROP"], check=True)
    for _ in range(2):
        run.wait_for("cut off from the store and from half or more of the round's pods: the workers are frozen")
    return before


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")
def test_workers_go_on_after_an_interruption_that_keep_alive_does_not_notice(tmp_path: Path) -> None:
    rules = {"keepAliveIntervalSeconds": 5}  # a node is frozen 1.25 s or more before a link is lost
    with LocalRun(job(tmp_path, rendezvous=rules), tmp_path, within=OWN_NETWORK) as run:
        packets = ["nsenter", f"--net=/proc/{run.pid}/ns/net", "iptables"]
        before = freeze_by_cutting_off(run, packets)
        subprocess.run([*packets, "-F", "INPUT"], check=True)
        for _ in range(2):
            run.wait_for("round 1.0.1 still runs: continuing the frozen workers")
        assert workers(run) == before
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
        assert "toy succeeded; 0 restarts" in run.text


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")
def test_nodes_that_are_cut_off_freeze_their_workers_until_the_coordinator_ends_the_round(tmp_path: Path) -> None:
    """The run has its own network namespace, in which no packet arrives for a while."""
    with LocalRun(job(tmp_path), tmp_path, within=OWN_NETWORK) as run:
        packets = ["nsenter", f"--net=/proc/{run.pid}/ns/net", "iptables"]
        before = freeze_by_cutting_off(run, packets)
        for pid in before.values():
            wait_until_stopped(pid)
        wait_until_the_round_has_ended()
        subprocess.run([*packets, "-F", "INPUT"], check=True)
        run.wait_for(r"round 1.0.2 runs: 2 workers on 2 pods")
        after = workers(run)
        assert not set(after.values()) & set(before.values())
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
        assert "toy succeeded; 0 restarts" in run.text

"""A stock torchrun with `--rdzv-backend=elasticjob`: torch finds the entry point, and rounds form and end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from support.torchrun import Torchrun, script

pytestmark = pytest.mark.torch
pytest.importorskip("torch")


def arguments(port: int, nodes: str, *more: str) -> list[str]:
    return [
        "--rdzv-backend=elasticjob", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1",
        "--monitor-interval=0.1", f"--nnodes={nodes}", *more,
    ]  # fmt: skip


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def trains(node: Torchrun, world: int, restarts: str = "[0-9]+") -> int:
    """Wait until a worker of this node trains in a world of this size, and return its process id."""
    return int(node.wait_for(rf"trains \d+ {world} \d+ {restarts} (\d+)")[1])


def test_the_job_survives_a_killed_worker_and_a_lost_node(tmp_path: Path, port: int) -> None:
    common = [*arguments(port, "2:3", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1"), *script(tmp_path)]
    with Torchrun(*common) as host, Torchrun(*common) as other, Torchrun(*common) as third:
        pids = [trains(node, 3) for node in (host, other, third)]
        os.kill(pids[1], signal.SIGKILL)
        pids = [trains(node, 3) for node in (host, other, third)]
        # One node hosts the store: it must not be the victim.
        victim, *survivors = sorted((host, other, third), key=lambda n: "serving on port" in n.text)
        os.killpg(victim.process.pid, signal.SIGKILL)
        os.kill(pids[(host, other, third).index(victim)], signal.SIGKILL)
        for node in survivors:
            trains(node, 2)
        (tmp_path / "done").touch()
        assert [node.exit_code() for node in survivors] == [0, 0]


def test_a_joining_node_starts_a_round_without_a_charge(tmp_path: Path, port: int) -> None:
    common = [*arguments(port, "1:2", "--max-restarts=0", "--rdzv-conf=last_call_timeout=1"), *script(tmp_path)]
    with Torchrun(*common) as host:
        trains(host, 1)
        with Torchrun(*common) as joiner:
            trains(joiner, 2)
            trains(host, 2, restarts="0")
            (tmp_path / "done").touch()
            assert [host.exit_code(), joiner.exit_code()] == [0, 0]


@pytest.mark.parametrize("host_fails", [True, False])
def test_a_worker_that_keeps_failing_ends_every_node(tmp_path: Path, port: int, host_fails: bool) -> None:
    """The failing node may be the one that hosts the store: the store then ends with it."""
    fails = "import os, sys, time\nif sys.argv[1] == 'fails': raise SystemExit(3)\ntime.sleep(99)"
    (tmp_path / "fails.py").write_text(fails)

    def node(*, host: bool, mode: str) -> Torchrun:
        options = arguments(port, "2", "--max-restarts=1", f"--rdzv-conf=is_host={int(host)}")
        return Torchrun(*options, str(tmp_path / "fails.py"), mode)

    with node(host=host_fails, mode="fails") as one, node(host=not host_fails, mode="stays") as two:
        assert [one.exit_code(90), two.exit_code(90)] == [1, 1]
        assert "RendezvousClosedError" in two.text

"""A stock torchrun with `--rdzv-backend=elasticjob`: torch finds the entry point, and rounds form and end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from support.common.torchrun import Torchrun, script

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


@pytest.mark.parametrize("store_type", ["tcp", pytest.param("file", marks=pytest.mark.deep)])
def test_torchs_own_handler_runs_on_elasticjobs_backend(tmp_path: Path, port: int, store_type: str) -> None:
    endpoint = f"localhost:{port}" if store_type == "tcp" else str(tmp_path / "state")
    options = [
        "--rdzv-backend=elasticjob", f"--rdzv-conf=handler=dynamic,store_type={store_type},last_call_timeout=1",
        f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--local-addr=127.0.0.1", "--nnodes=2", "--max-restarts=3",
    ]  # fmt: skip
    common = [*options, *script(tmp_path)]
    with Torchrun(*common) as one, Torchrun(*common) as two:
        for node in (one, two):
            trains(node, 2, restarts="0")
        (tmp_path / "done").touch()
        assert [one.exit_code(), two.exit_code()] == [0, 0]


SHORT_EXIT_BARRIER = """
import functools
from torch.distributed.launcher import api
api.LocalElasticAgent = functools.partial(api.LocalElasticAgent, exit_barrier_timeout=1)
from torch.distributed.run import main
main()
"""

FINISHES = """
import os, sys, time
for step in range(10**6):
    print("step", step, flush=True)
    if sys.argv[1] == "first" or os.path.exists(sys.argv[2]):
        break
    time.sleep(0.05)
"""


@pytest.mark.parametrize("first_is_host", [True, False])
def test_a_node_that_finishes_first_leaves_the_others_running(tmp_path: Path, port: int, first_is_host: bool) -> None:
    """Its torchrun gives up the exit barrier, closes the rendezvous and ends, and the store with it if it is the host.

    torch waits 300 s at the barrier: the others evaluate or upload for longer.
    """
    (tmp_path / "finishes.py").write_text(FINISHES)

    def node(mode: str, *, host: bool) -> Torchrun:
        options = arguments(port, "2", "--max-restarts=0", f"--rdzv-conf=is_host={int(host)}")
        script = [str(tmp_path / "finishes.py"), mode, str(tmp_path / "done")]
        return Torchrun(*options, *script, program=("-c", SHORT_EXIT_BARRIER))

    with node("first", host=first_is_host) as first, node("last", host=not first_is_host) as last:
        assert first.exit_code(90) == 0
        assert "Error waiting on exit barrier" in first.text
        step = int(last.wait_for(r"step (\d+)$")[1])
        last.wait_for(rf"step {int(last.lines[-1].split()[-1]) + 60}$")  # 3 s later; a stopped worker is gone after 1 s
        (tmp_path / "done").touch()
        assert last.exit_code(90) == 0
        assert sum(line.endswith("step 0") for line in last.lines) == 1
        assert step == 0


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

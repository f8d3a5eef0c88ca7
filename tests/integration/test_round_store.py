"""The process-group store of a round, on the agent of rank 0: it serves until all members have stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.store import wire
from elasticjob._runtime.store.wire import Op
from support.agent.cluster import AgentCluster, start_nodes
from support.local.run import LocalRun, manifest

SCRIPT = """
import os, signal, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def stop(number, frame):
    if os.environ["RANK"] == "1":  # rank 0 has already stopped
        end = time.monotonic() + 1
        while time.monotonic() < end:
            socket.create_connection(address, 1).close()
            time.sleep(0.01)
        print("the store served to the end", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
print("rank", os.environ["RANK"], "agent", os.getppid(), "pid", os.getpid(), "port", address[1], flush=True)
while True:
    signal.pause()
"""


def job(folder: Path) -> dict[str, Any]:
    (folder / "script.py").write_text(SCRIPT)
    elastic = {"minReplicas": 1, "maxReplicas": 2}
    command = [sys.executable, str(folder / "script.py")]
    return manifest(command, replicas=2, elasticPolicy=elastic, stopGraceSeconds=10)


def started(run: LocalRun) -> dict[str, int]:
    """Return agent, process id and store port of rank 0, once both ranks have started."""
    lines = [run.wait_for(r"^\[default\d\]:rank (\d) agent (\d+) pid (\d+) port (\d+)") for _ in range(2)]
    first = next(match for match in lines if match[1] == "0")
    return {"agent": int(first[2]), "pid": int(first[3]), "port": int(first[4])}


def serves(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10).close()
        return True
    return False


def test_an_agent_that_leaves_keeps_the_store_of_its_round_up_until_all_members_have_stopped(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        os.kill(started(run)["agent"], signal.SIGTERM)
        run.wait_for("the store served to the end")


def test_the_store_of_a_round_closes_after_the_round(tmp_path: Path) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        first = started(run)
        os.kill(first["pid"], signal.SIGKILL)
        second = started(run)
        assert (second["agent"], second["port"] == first["port"]) == (first["agent"], False)
        assert serves(second["port"])
        deadline = time.monotonic() + 30
        while serves(first["port"]):
            assert time.monotonic() < deadline, f"the store of the first round still serves on {first['port']}"


def answer(source: str, port: int) -> bytes:
    """Ask a store for its number of keys, from an address of this machine. Return its answer, empty if it closed."""
    with socket.create_connection(("127.0.0.1", port), 30, (source, 0)) as client:
        client.sendall(wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.GETNUMKEYS))
        with contextlib.suppress(ConnectionResetError):
            return client.recv(8)
        return b""


def test_only_clients_on_the_addresses_of_nodes_use_the_store_of_a_round_and_none_that_of_the_job(
    tmp_path: Path,
) -> None:
    with LocalRun(job(tmp_path), tmp_path) as run:
        rank_0 = started(run)
        assert answer("127.0.0.1", rank_0["port"]) == wire.i64(0)
        assert answer("127.0.0.9", rank_0["port"]) == b""
        run.wait_for("no agent of this job has a control link from its address")
        environ = Path(f"/proc/{rank_0['agent']}/environ").read_bytes().split(b"\0")
        endpoint = next(e for e in environ if e.startswith(f"{Env.STORE_ENDPOINT}=".encode())).decode()
        assert answer("127.0.0.1", int(endpoint.rpartition(":")[2])) == b""


REQUEST = wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.GETNUMKEYS)
WORKER = f"""
import os, socket, time
own = "127.0.0." + str(int(os.environ["RANK"]) + 1)
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60, (own, 0)) as client:
    client.sendall(bytes.fromhex("{REQUEST.hex()}"))
    print("answer", client.recv(8).hex(), "to", own, flush=True)
time.sleep(600)
"""


class NodesWithoutLinks(AgentCluster):
    """Each node has an address of its own, from which its worker connects. All links come from the first address."""

    hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    script = WORKER


async def test_the_store_of_a_round_serves_the_workers_on_the_addresses_of_its_nodes_before_their_links(
    tmp_path: Path,
) -> None:
    cluster = NodesWithoutLinks(tmp_path)
    try:
        await start_nodes(cluster)
        for address, agent in zip(cluster.hosts, cluster.agents, strict=True):
            assert (await agent.line("answer ")).endswith(f"answer {wire.i64(0).hex()} to {address}")
    finally:
        await cluster.close()

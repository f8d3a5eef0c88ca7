"""The end of a store process: a node reports a newer store, or the process is ended while its nodes need it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    CoordinatorToAgent,
    EndRound,
    Finish,
    Leaving,
    Message,
    NewerStore,
    RoundSettings,
    Standby,
    StartRound,
    WorkersStarted,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.control_link.coordinator_client import CoordinatorClient
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect

PROGRAM = [sys.executable, str(Path(__file__).parents[2] / "agent" / "elasticjob"), "store"]
KEY = b"n" * 32
Store = tuple[asyncio.subprocess.Process, int]
StartStore = Callable[[int], Awaitable[Store]]
M = TypeVar("M", bound=Message)


@pytest.fixture
async def start_store() -> AsyncIterator[StartStore]:
    started: list[asyncio.subprocess.Process] = []

    async def start(incarnation: int) -> Store:
        environ = environment(incarnation)
        process = await asyncio.create_subprocess_exec(*PROGRAM, env=environ, stderr=asyncio.subprocess.PIPE)
        started.append(process)
        line = await log_line(process, "serving on port")
        return process, int(line.split("serving on port ")[1].split(",")[0])

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


def environment(incarnation: int) -> dict[str, str]:
    return {
        **os.environ,
        Env.RUN_ID: "run",
        Env.NODE_KEY: KEY.hex(),
        Env.OPERATOR_KEY: "bb" * 32,
        Env.STORE_INCARNATION: str(incarnation),
        Env.PORT: "0",
        Env.SETTINGS: codec.dumps(RoundSettings(1, 2, 2)).decode(),
    }


async def log_line(process: asyncio.subprocess.Process, text: str) -> str:
    """Return the next line of the process's log that contains `text`."""
    assert process.stderr is not None
    while True:
        line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        assert line, f"the process ended without logging {text!r}"
        if text in line:
            return line


async def dial(port: int) -> ControlLink:
    return await connect("127.0.0.1", port, role=LinkRole.AGENT, key=KEY, run_id="run")


async def test_a_store_closes_itself_when_a_node_knows_a_newer_one(start_store: StartStore) -> None:
    older, old_port = await start_store(0)
    _, new_port = await start_store(1)
    ports = [new_port, old_port, new_port]
    other_node = await dial(old_port)
    other_node.send(Announce(1, 0, "other", "j-1-0", "127.0.0.1", 1, 1))
    assert isinstance(await other_node.receive(), Standby)
    received: asyncio.Queue[CoordinatorToAgent] = asyncio.Queue()
    links: list[ControlLink] = []

    async def next_store() -> ControlLink:
        links.append(await dial(ports.pop(0)))
        return links[-1]

    def greeting() -> tuple[AgentToCoordinator, ...]:
        if len(links) == 1:  # the node loses its link to the newer store
            asyncio.get_running_loop().call_soon(links[0].close)
        return (Announce(0, 0, "agent_id", "j-0-0", "127.0.0.1", 1, 1),)

    node = CoordinatorClient(next_store, greeting, received.put_nowait, had_round=lambda: True, join_timeout=1.0)
    running = asyncio.ensure_future(node.run())
    await log_line(older, "closed: store 1 has taken over")
    assert await asyncio.wait_for(other_node.receive(), 10) is None
    with pytest.raises(ConnectionRefusedError):
        await dial(old_port)
    assert older.returncode is None
    older.terminate()
    assert await asyncio.wait_for(older.wait(), 10) == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def leaving_round(port: int) -> tuple[list[ControlLink], RoundId]:
    """Connect two nodes that run a round, which ends because the second one leaves."""
    nodes = [await dial(port), await dial(port)]
    for index, node in enumerate(nodes):
        node.send(Announce(index, 0, f"a{index}", f"j-{index}-0", "127.0.0.1", 1, 1))
    starts = [await receive(node, StartRound) for node in nodes]
    for node in nodes:
        node.send(WorkersStarted(starts[0].round))
    nodes[1].send(Leaving("SIGTERM"))
    for node in nodes:
        await receive(node, EndRound)
    return nodes, starts[0].round


async def receive(link: ControlLink, kind: type[M]) -> M:
    while not isinstance(message := await asyncio.wait_for(link.receive(), 10), kind):
        assert message is not None, f"closed while waiting for {kind.__name__}"
    return message


async def test_a_store_that_is_ended_concludes_the_end_of_a_round_first(start_store: StartStore) -> None:
    store, port = await start_store(0)
    nodes, round_id = await leaving_round(port)
    store.terminate()
    await log_line(store, "ends once its agents can do without it")
    for node in nodes:
        node.send(WorkersStopped(round_id, 2))
    await receive(nodes[1], Finish)
    assert await asyncio.wait_for(store.wait(), 10) == 0
    nodes[0].close()


async def test_a_store_that_is_ended_twice_ends_at_once(start_store: StartStore) -> None:
    store, port = await start_store(0)
    nodes, _ = await leaving_round(port)
    store.terminate()
    await log_line(store, "ends once its agents can do without it")
    store.terminate()
    assert await asyncio.wait_for(store.wait(), 10) == 0
    for node in nodes:
        node.close()


async def test_a_store_does_not_close_for_a_store_that_is_not_newer(start_store: StartStore) -> None:
    _, port = await start_store(1)
    link = await dial(port)
    link.send(NewerStore(1))
    assert await asyncio.wait_for(link.receive(), 10) is None
    link = await dial(port)
    assert link.welcome.incarnation == 1
    link.close()


DELETED_WHILE_IT_IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "elasticjob._runtime.store_pod.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""


async def test_a_store_that_is_ended_while_it_imports_does_not_stay(tmp_path: Path) -> None:
    """In a container it is PID 1, and the kernel drops its signals as long as they have no handler."""
    (tmp_path / "sitecustomize.py").write_text(DELETED_WHILE_IT_IMPORTS)
    environ = {**environment(0), "PYTHONPATH": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(*PROGRAM, env=environ, stderr=asyncio.subprocess.PIPE)
    await log_line(process, "this store ends once its agents can do without it")
    assert await asyncio.wait_for(process.wait(), 20) == 0

"""Two store processes at once: the older one closes itself when a node reports the newer one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from elasticjob.contract import codec
from elasticjob.contract.messages import (
    Announce,
    CoordinatorToNode,
    NewerStore,
    NodeToCoordinator,
    RoundSettings,
    Standby,
)
from elasticjob.contract.names import Env
from elasticjob.control_link.link import ControlLink, LinkRole, connect
from elasticjob.control_link.node_client import NodeClient

PROGRAM = [sys.executable, str(Path(__file__).parents[2] / "agent" / "elasticjob"), "store"]
KEY = b"n" * 32
Store = tuple[asyncio.subprocess.Process, int]
StartStore = Callable[[int], Awaitable[Store]]


@pytest.fixture
async def start_store() -> AsyncIterator[StartStore]:
    started: list[asyncio.subprocess.Process] = []

    async def start(incarnation: int) -> Store:
        environ = {
            **os.environ,
            Env.RUN_ID: "run",
            Env.NODE_KEY: KEY.hex(),
            Env.OPERATOR_KEY: "bb" * 32,
            Env.STORE_INCARNATION: str(incarnation),
            Env.PORT: "0",
            Env.SETTINGS: codec.dumps(RoundSettings(1, 2, 2)).decode(),
        }
        process = await asyncio.create_subprocess_exec(*PROGRAM, env=environ, stderr=asyncio.subprocess.PIPE)
        started.append(process)
        line = await log_line(process, "serving on port")
        return process, int(line.split("serving on port ")[1].split(",")[0])

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def log_line(process: asyncio.subprocess.Process, text: str) -> str:
    """Return the next line of the process's log that contains `text`."""
    assert process.stderr is not None
    while True:
        line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        assert line, f"the process ended without logging {text!r}"
        if text in line:
            return line


async def dial(port: int) -> ControlLink:
    return await connect("127.0.0.1", port, role=LinkRole.NODE, key=KEY, run_id="run")


async def test_a_store_closes_itself_when_a_node_knows_a_newer_one(start_store: StartStore) -> None:
    older, old_port = await start_store(0)
    _, new_port = await start_store(1)
    ports = [new_port, old_port, new_port]
    other_node = await dial(old_port)
    other_node.send(Announce(1, 0, "other", "j-1-0", "127.0.0.1", 1, 1))
    assert isinstance(await other_node.receive(), Standby)
    received: asyncio.Queue[CoordinatorToNode] = asyncio.Queue()
    links: list[ControlLink] = []

    async def next_store() -> ControlLink:
        links.append(await dial(ports.pop(0)))
        return links[-1]

    def greeting() -> tuple[NodeToCoordinator, ...]:
        if len(links) == 1:  # the node loses its link to the newer store
            asyncio.get_running_loop().call_soon(links[0].close)
        return (Announce(0, 0, "agent_id", "j-0-0", "127.0.0.1", 1, 1),)

    node = NodeClient(next_store, greeting, received.put_nowait, had_round=lambda: True, join_timeout=1.0)
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


async def test_a_store_does_not_close_for_a_store_that_is_not_newer(start_store: StartStore) -> None:
    _, port = await start_store(1)
    link = await dial(port)
    link.send(NewerStore(1))
    assert await asyncio.wait_for(link.receive(), 10) is None
    link = await dial(port)
    assert link.welcome.incarnation == 1
    link.close()

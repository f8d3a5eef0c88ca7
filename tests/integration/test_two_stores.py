"""Two store processes at once: the older one hears of the newer one from a node, and closes itself."""

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
        line = await said(process, "serving on port")
        return process, int(line.split("serving on port ")[1].split(",")[0])

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, what: str) -> str:
    """The next line of its log with these words."""
    assert process.stderr is not None
    while True:
        line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        assert line, f"it ended without {what!r}"
        if what in line:
            return line


async def dial(port: int) -> ControlLink:
    return await connect("127.0.0.1", port, role=LinkRole.NODE, key=KEY, run_id="run")


async def test_a_store_closes_itself_when_a_node_knows_a_newer_one(start_store: StartStore) -> None:
    older, old_port = await start_store(0)
    _, new_port = await start_store(1)
    ports = [new_port, old_port, new_port]
    bystander = await dial(old_port)
    bystander.send(Announce(1, 0, "other", "j-1-0", "127.0.0.1", 1, 1))
    assert isinstance(await bystander.receive(), Standby)
    heard: asyncio.Queue[CoordinatorToNode] = asyncio.Queue()
    links: list[ControlLink] = []

    async def next_store() -> ControlLink:
        links.append(await dial(ports.pop(0)))
        return links[-1]

    def greeting() -> tuple[NodeToCoordinator, ...]:
        if len(links) == 1:  # away from the newer one, as the network would have it
            asyncio.get_running_loop().call_soon(links[0].close)
        return (Announce(0, 0, "agent_id", "j-0-0", "127.0.0.1", 1, 1),)

    node = NodeClient(next_store, greeting, heard.put_nowait, had_round=lambda: True, join_timeout=1.0)
    running = asyncio.ensure_future(node.run())
    await said(older, "closed: store 1 has taken over")
    assert await asyncio.wait_for(bystander.receive(), 10) is None
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

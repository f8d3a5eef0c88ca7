"""Many nodes in one process, each on its own connection: `python -m benchmarks.crowd N`, job as for an agent.

Prints one JSON object: seconds and what went over the wire. The store is another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from elasticjob.agent.config import AgentConfig, read_config
from elasticjob.contract.messages import (
    Announce,
    EndRound,
    Failure,
    FailureClass,
    NodeToCoordinator,
    StartRound,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
)
from elasticjob.control_link.link import ControlLink, LinkRole, connect
from elasticjob.store_pod.main import raise_open_file_limit

AT_ONCE = 256
"""Connections being made at a time: the server's backlog is not what is measured."""
_BYTES = struct.Struct("QQ")
_BYTES_AT = 120
"""Offset of tcpi_bytes_acked and tcpi_bytes_received in Linux' tcp_info."""


def moved(sock: socket.socket) -> int:
    """Payload bytes that went over a TCP connection, both ways."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_AT + _BYTES.size)
    return sum(_BYTES.unpack_from(info, _BYTES_AT))


def processor(pid: int) -> float:
    """Seconds that all threads of a process have computed: tells more than time on a machine that others use."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@dataclass
class SimulatedNode:
    """One node without workers: it says what an agent says."""

    index: int
    link: ControlLink
    messages: int = 0
    start: StartRound | None = None

    def say(self, message: NodeToCoordinator) -> None:
        self.messages += 1
        self.link.send(message)

    def announce(self) -> None:
        name = f"node-{self.index}"
        self.say(Announce(self.index, 0, name, name, "127.0.0.1", 20000 + self.index, 1, ready=True))

    async def until_ranked(self) -> None:
        """Answer as an agent would, until a new round is assigned."""
        before = self.start
        while self.start is before:
            message = await self.link.receive()
            self.messages += 1
            if message is None:
                how = "by keep-alive" if self.link.lost_by_keep_alive else "closed"
                raise ConnectionError(f"node {self.index} lost its link: {how}")
            if isinstance(message, EndRound):
                self.say(WorkersStopped(message.round, 20000 + self.index))
            if isinstance(message, StartRound):
                self.start = message

    @property
    def bytes(self) -> int:
        return moved(self.link._frames.transport.get_extra_info("socket"))


class Crowd:
    """N nodes of a job."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.nodes: list[SimulatedNode] = []

    async def connect(self, count: int) -> float:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> SimulatedNode:
            config = self._config
            async with gate:
                link = await connect(
                    config.host, config.port, role=LinkRole.NODE, key=config.key, run_id=config.run_id, timeout=60
                )
            return SimulatedNode(index, link)

        began = time.monotonic()
        self.nodes = list(await asyncio.gather(*(one(index) for index in range(count))))
        return time.monotonic() - began

    async def join(self) -> float:
        """Everyone announces itself; until the last one has its ranks."""
        began = time.monotonic()
        for node in self.nodes:
            node.announce()
        return await self._ranked(began)

    async def again(self) -> float:
        """All run; one worker fails; until everyone has ranks in the next round."""
        for node in self.nodes:
            assert node.start is not None
            node.say(WorkersStarted(node.start.round))
        await asyncio.sleep(0.5 + len(self.nodes) / 2000)  # the round is formed: nothing tells a node so
        began = time.monotonic()
        first = self.nodes[0]
        assert first.start is not None
        failure = Failure(FailureClass.KILLED, "node-0", time.time(), rank=0, signal="SIGKILL")
        first.say(WorkersFailed(first.start.round, failure))
        return await self._ranked(began)

    async def _ranked(self, began: float) -> float:
        await asyncio.gather(*(node.until_ranked() for node in self.nodes))
        return time.monotonic() - began

    def counted(self) -> tuple[int, int]:
        return sum(n.messages for n in self.nodes), sum(n.bytes for n in self.nodes)


async def main() -> None:
    count = int(sys.argv[1])
    raise_open_file_limit()
    crowd = Crowd(read_config(os.environ))
    connecting = await crowd.connect(count)
    _, before = crowd.counted()
    store = int(os.environ["BENCH_STORE_PID"])
    began = processor(store)
    joining = await crowd.join()
    joined = processor(store)
    messages, told = crowd.counted()
    figures = {
        "connect": connecting,
        "rendezvous": joining,
        "messages per node": messages / count,
        "bytes per node": (told - before) / count,
        "handshake bytes per node": before / count,
        "store's processor seconds": joined - began,
    }
    again = await crowd.again()
    later, bytes_later = crowd.counted()
    figures |= {
        "again": again,
        "messages per node, again": (later - messages) / count,
        "bytes per node, again": (bytes_later - told) / count,
        "store's processor seconds, again with starts": processor(store) - joined,
    }
    assert {n.start.rank for n in crowd.nodes if n.start} == set(range(count)), "ranks are not 0 to N - 1"
    quiet = time.monotonic()
    await asyncio.sleep(float(os.environ.get("BENCH_QUIET_SECONDS", "0")))
    idle = crowd.counted()
    figures["messages per node and second, steady"] = (idle[0] - later) / count / max(0.001, time.monotonic() - quiet)
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main())

"""Simulate N nodes in one process: `python -m benchmarks.crowd N`. The environment is that of an agent.

Each node has its own connection to the store, which is another process. The output is one JSON object with seconds,
messages and bytes.
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

from benchmarks.threads import thread_files
from elasticjob._runtime.agent.config import AgentConfig, read_config
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    EndRound,
    Failure,
    FailureClass,
    StartRound,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
)
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect
from elasticjob._runtime.store.open_files import raise_open_file_limit

AT_ONCE = 256
"""Connections opened at a time, so that the server's backlog does not limit them."""
_BYTES = struct.Struct("QQ")
_BYTES_AT = 120
"""Offset of tcpi_bytes_acked and tcpi_bytes_received in Linux' tcp_info."""


def transferred(sock: socket.socket) -> int:
    """Return the payload bytes of a TCP connection, in both directions."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_AT + _BYTES.size)
    return sum(_BYTES.unpack_from(info, _BYTES_AT))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process. They vary less than elapsed time on a shared machine."""
    return sum(int(text.split()[0]) for text in thread_files(pid, "schedstat")) / 1e9


@dataclass
class SimulatedNode:
    """One node without workers. It sends the messages that an agent sends."""

    index: int
    link: ControlLink
    messages: int = 0
    start: StartRound | None = None

    def send(self, message: AgentToCoordinator) -> None:
        self.messages += 1
        self.link.send(message)

    def announce(self) -> None:
        name = f"node-{self.index}"
        self.send(Announce(self.index, 0, name, name, "127.0.0.1", 20000 + self.index, 1, ready=True))

    async def wait_for_round(self) -> None:
        """Answer as an agent does until the coordinator assigns a new round."""
        before = self.start
        while self.start is before:
            message = await self.link.receive()
            self.messages += 1
            if message is None:
                cause = "keep-alive" if self.link.lost_by_keep_alive else "closed by the store"
                raise ConnectionError(f"node {self.index} lost its link: {cause}")
            if isinstance(message, EndRound):
                self.send(WorkersStopped(message.round, 20000 + self.index))
            if isinstance(message, StartRound):
                self.start = message

    @property
    def bytes(self) -> int:
        return transferred(self.link.frames.transport.get_extra_info("socket"))


class Crowd:
    """The simulated nodes of one job."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.nodes: list[SimulatedNode] = []

    async def connect(self, count: int) -> float:
        """Connect `count` nodes and return the seconds this takes."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def connect_one(index: int) -> SimulatedNode:
            config = self._config
            async with gate:
                link = await connect(
                    config.host, config.port, role=LinkRole.AGENT, key=config.key, run_id=config.run_id, timeout=60
                )
            return SimulatedNode(index, link)

        began = time.monotonic()
        self.nodes = list(await asyncio.gather(*(connect_one(index) for index in range(count))))
        return time.monotonic() - began

    async def join(self) -> float:
        """Announce all nodes and return the seconds until the last node has its ranks."""
        began = time.monotonic()
        for node in self.nodes:
            node.announce()
        return await self._all_ranked(began)

    async def again(self) -> float:
        """Report a failed worker in a running round and return the seconds until all nodes have their next ranks."""
        for node in self.nodes:
            assert node.start is not None
            node.send(WorkersStarted(node.start.round))
        await asyncio.sleep(0.5 + len(self.nodes) / 2000)  # the round has formed by then; no message reports it
        began = time.monotonic()
        first = self.nodes[0]
        assert first.start is not None
        failure = Failure(FailureClass.KILLED, "node-0", time.time(), rank=0, signal="SIGKILL")
        first.send(WorkersFailed(first.start.round, failure))
        return await self._all_ranked(began)

    async def _all_ranked(self, began: float) -> float:
        await asyncio.gather(*(node.wait_for_round() for node in self.nodes))
        return time.monotonic() - began

    def totals(self) -> tuple[int, int]:
        """Return the messages and the bytes of all nodes so far."""
        return sum(n.messages for n in self.nodes), sum(n.bytes for n in self.nodes)


async def main() -> None:
    count = int(sys.argv[1])
    raise_open_file_limit()
    crowd = Crowd(read_config(os.environ))
    connecting = await crowd.connect(count)
    _, before = crowd.totals()
    store = int(os.environ["BENCH_STORE_PID"])
    began = cpu_seconds(store)
    joining = await crowd.join()
    joined = cpu_seconds(store)
    messages, joined_bytes = crowd.totals()
    figures = {
        "connect": connecting,
        "rendezvous": joining,
        "messages per node": messages / count,
        "bytes per node": (joined_bytes - before) / count,
        "handshake bytes per node": before / count,
        "store's processor seconds": joined - began,
    }
    again = await crowd.again()
    later, bytes_later = crowd.totals()
    figures |= {
        "again": again,
        "messages per node, again": (later - messages) / count,
        "bytes per node, again": (bytes_later - joined_bytes) / count,
        "store's processor seconds, again with starts": cpu_seconds(store) - joined,
    }
    assert {n.start.rank for n in crowd.nodes if n.start} == set(range(count)), "ranks are not 0 to N - 1"
    quiet = time.monotonic()
    await asyncio.sleep(float(os.environ.get("BENCH_QUIET_SECONDS", "0")))
    idle = crowd.totals()
    figures["messages per node and second, steady"] = (idle[0] - later) / count / max(0.001, time.monotonic() - quiet)
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main())

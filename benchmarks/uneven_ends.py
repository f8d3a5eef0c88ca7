"""The coordinator of a large job whose round ends unevenly: `python -m benchmarks.uneven_ends KIND NODES WORKERS`.

KIND is one of KINDS. The nodes are simulated in the coordinator's process; their messages are encoded and decoded, but
cross no socket. A turn is what the event loop does before it reads the next messages, of READY_AT_ONCE nodes at most.
The output is one JSON object with the coordinator's CPU seconds, from the first end of a worker to the last node's
assignment in the next round.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.row import OURS, Row, Sample
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    EndRound,
    Failure,
    FailureClass,
    Message,
    RoundSettings,
    StartRound,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
    decode,
    encode,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkRole
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store_pod.coordinator import Coordinator
from elasticjob._runtime.store_pod.event_loop import READY_AT_ONCE

ROOT = Path(__file__).parents[1]
CAP = 600.0
"""Time limit of a sample, in seconds."""


class _Node:
    """The node's end of a link to the coordinator, and the coordinator's end of it."""

    role, peer = LinkRole.AGENT, "simulated"

    def __init__(self, index: int, workers: int) -> None:
        self.index, self.workers = index, workers
        self.pod = f"job-{index}-0"
        self.start: StartRound | None = None
        self.ending: RoundId | None = None
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    # ---- what the coordinator calls

    def send(self, message: Message) -> None:
        encode(message)  # which the coordinator does; there is no socket for the bytes
        if isinstance(message, StartRound):
            self.start = message
        elif isinstance(message, EndRound):
            self.ending = message.round

    async def receive(self) -> Message | None:
        return decode(await self._frames.get())

    def close(self) -> None: ...

    # ---- what the node sends

    def put(self, message: AgentToCoordinator) -> None:
        self._frames.put_nowait(encode(message))

    @property
    def round(self) -> RoundId:
        assert self.start is not None
        return self.start.round

    def announce(self) -> None:
        port, name = 20000 + self.index, f"agent-{self.index}"
        address = f"10.0.{self.index >> 8}.{self.index & 255}"
        self.put(Announce(self.index, 0, name, self.pod, address, port, self.workers, ready=True))

    def started(self) -> None:
        self.put(WorkersStarted(self.round))

    def fail(self) -> None:
        assert self.start is not None
        kind, text = FailureClass.COLLECTIVE_FAILED, "Connection closed by peer"
        failure = Failure(kind, self.pod, time.time(), rank=self.start.rank, exit_code=1, message=text)
        self.put(WorkersFailed(self.round, failure))

    def succeed(self) -> None:
        self.put(WorkersSucceeded(self.round))

    def stop(self, ended: bool = False) -> None:
        assert self.start is not None
        ranks = tuple(range(self.start.rank, self.start.rank + self.workers)) if ended else ()
        self.put(WorkersStopped(self.round, 20000 + self.index, ranks))


class _Job:
    """A coordinator with its simulated nodes. The time of each turn of its event loop is measured."""

    def __init__(self, nodes: int, workers: int) -> None:
        settings = RoundSettings(nodes, nodes, nodes, max_restarts=1000)
        self.coordinator = Coordinator(initial_state(settings, attempt=1, store=0, now=time.monotonic(), epoch=0.0))
        self.nodes = [_Node(index, workers) for index in range(nodes)]
        self.took = self.longest = 0.0
        """CPU seconds of all turns, and of the longest one."""

    async def train(self) -> None:
        """Bring all nodes into a round whose workers run."""
        self.coordinator.start()
        self.tasks = [asyncio.ensure_future(self.coordinator.serve(cast("ControlLink", n))) for n in self.nodes]
        await self.together(node.announce for node in self.nodes)
        await self.until(lambda: all(node.start for node in self.nodes))
        await self.together(node.started for node in self.nodes)
        await self.until(lambda: bool(self.coordinator.state.round and self.coordinator.state.round.formed_at))

    async def together(self, actions: Iterable[Callable[[], Any]]) -> None:
        """Let the messages arrive at once. The store's event loop reads from READY_AT_ONCE links in a turn."""
        for position, action in enumerate(actions, 1):
            action()
            if position % READY_AT_ONCE == 0:
                await self.turn()
        await self.turn()

    async def one_by_one(self, actions: Iterable[Callable[[], Any]]) -> None:
        """Let the coordinator decide each message before the next one arrives."""
        for action in actions:
            action()
            for _ in ("the link's task receives it", "the coordinator decides"):
                await self.turn()

    async def turn(self) -> None:
        began = time.process_time()
        await asyncio.sleep(0)
        seconds = time.process_time() - began
        self.took, self.longest = self.took + seconds, max(self.longest, seconds)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.turn()


Deliver = Callable[[Iterable[Callable[[], Any]]], Any]


async def _half_end(job: _Job, deliver: Deliver) -> None:
    """Half of the nodes have succeeded when a collective fails on the others."""
    ended, others = job.nodes[::2], job.nodes[1::2]
    await deliver(node.succeed for node in ended)
    await deliver(node.fail for node in others)
    await _stop(job, deliver, ended)


async def _all_fail(job: _Job, deliver: Deliver) -> None:
    await deliver(node.fail for node in job.nodes)
    await _stop(job, deliver)


async def _stop(job: _Job, deliver: Deliver, ended: Sequence[_Node] = ()) -> None:
    before, known = job.nodes[0].round, {node.index for node in ended}
    await job.until(lambda: all(node.ending == before for node in job.nodes))
    await deliver(partial(node.stop, ended=node.index in known) for node in job.nodes)
    await job.until(lambda: all(node.round != before for node in job.nodes))


async def measure(kind: str, nodes: int, workers: int) -> dict[str, float]:
    job = _Job(nodes, workers)
    await job.train()
    deliver = job.one_by_one if kind.endswith("one-by-one") else job.together
    job.took = job.longest = 0.0
    await (_half_end if kind.startswith("half") else _all_fail)(job, deliver)
    for task in job.tasks:
        task.cancel()
    job.coordinator.stop()
    return {"seconds": job.took, "longest turn": job.longest}


KINDS = {
    "half-end": "half of the nodes succeed, then the others fail at once",
    "half-end-one-by-one": "half of the nodes succeed, then the others fail, one after the other",
    "all-fail": "all nodes fail at once",
    "all-fail-one-by-one": "all nodes fail, one after the other",
}


def _once(kind: str, nodes: int, workers: int, figure: str) -> Callable[[Path], Sample]:
    def once(_: Path) -> Sample:
        argv = [sys.executable, "-m", "benchmarks.uneven_ends", kind, str(nodes), str(workers)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=CAP, check=False)
        if done.returncode:
            return Sample(None, done.stderr.strip()[-300:])
        figures = json.loads(done.stdout)
        return Sample(figures.pop(figure), parts=figures)

    return once


NODES, WORKERS = 4096, 8
_TITLE = f"coordinator of {NODES} nodes of {WORKERS}"
ROWS = [
    *(
        Row(f"uneven-{kind}", f"{_TITLE}: {what}: CPU time to the next round", "s", 1.0,
            {OURS: _once(kind, NODES, WORKERS, "seconds")}, {OURS: 3}, 15)
        for kind, what in KINDS.items()
    ),
    Row("uneven-no-answer", f"{_TITLE}: {KINDS['half-end']}: longest time without an answer", "s", 0.1,
        {OURS: _once("half-end", NODES, WORKERS, "longest turn")}, {OURS: 3}, 15),
]  # fmt: skip


def main() -> None:
    print(json.dumps(asyncio.run(measure(sys.argv[1], *map(int, sys.argv[2:])))))


if __name__ == "__main__":
    main()

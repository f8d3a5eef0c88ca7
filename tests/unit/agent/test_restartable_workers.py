"""The agent's end of the connections of workers whose function can be called again, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elasticjob._runtime.agent.workers.processes.restartable_workers import Reported, RestartableWorkers
from elasticjob._runtime.contract import restart_messages
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import (
    MAX_MESSAGE,
    BreakCollectives,
    Calling,
    CollectiveFailed,
    Guarded,
    Interrupt,
    Interrupted,
    Parked,
    ResultsEnded,
    WorkerToAgent,
)

ROUND = RoundId(1, 0, 1)
ME = os.getpid()


class Worker:
    """This process as a worker, and what its agent gets of it."""

    def __init__(self, agent: RestartableWorkers) -> None:
        self.agent = agent
        self.received: list[Reported] = []
        agent.on_message = lambda _pid, message: self.received.append(message)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(agent.path)
        self._socket.settimeout(10)

    async def send(self, *messages: WorkerToAgent) -> None:
        """Send messages, and wait until the agent has passed on those that it passes on: all but `Interrupted`."""
        wanted = len(self.received) + sum(not isinstance(message, Interrupted) for message in messages)
        for message in messages:
            self._socket.send(restart_messages.to_packet(message))
        async with asyncio.timeout(60):
            while len(self.received) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def receive(self) -> object:
        return restart_messages.from_packet(self._socket.recv(MAX_MESSAGE))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    agent = RestartableWorkers(tmp_path)
    worker = Worker(agent)
    yield worker
    worker.close()
    agent.close()


async def test_all_that_was_sent_before_the_process_id_was_known_is_repeated(worker: Worker) -> None:
    failed = CollectiveFailed(ROUND, "first", overdue=True)
    sent = (Calling(ROUND), Guarded(ROUND, 9.0), Guarded(ROUND, 5.0), failed, CollectiveFailed(ROUND, "next", False))
    await worker.send(*sent)
    worker.received.clear()
    worker.agent.repeat(ME)
    assert worker.received == [Calling(ROUND), Guarded(ROUND, 5.0), failed]


async def test_a_worker_breaks_its_collectives_only_after_it_has_ended_its_results(worker: Worker) -> None:
    await worker.send(Calling(ROUND))
    assert worker.agent.interrupt(ME)
    assert worker.receive() == Interrupt(ROUND)
    assert not worker.agent.all_results_ended([ME])
    worker.agent.break_collectives(ME)  # it has none to break with others, or does not wait
    await worker.send(ResultsEnded(ROUND))
    assert worker.agent.all_results_ended([ME])
    worker.agent.break_collectives(ME)
    assert worker.receive() == BreakCollectives(ROUND)
    await worker.send(Parked(ROUND))
    assert not worker.agent.all_results_ended([ME]), "nothing waits"
    assert worker.agent.call_again(ME, ROUND, {})
    assert not worker.agent.results_ended(ME)


async def test_a_worker_that_is_called_again_has_not_left_its_function(worker: Worker) -> None:
    await worker.send(Calling(ROUND), Interrupted(ROUND), Parked(ROUND))
    assert worker.agent.interrupted(ME)
    assert worker.agent.call_again(ME, ROUND, {})
    assert not worker.agent.interrupted(ME)

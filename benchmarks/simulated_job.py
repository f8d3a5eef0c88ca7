"""Stores and nodes of many jobs in one process.

A store is a real one: server, coordinator and control link of the operator, at the address of its pod. A node sends its
coordinator the messages of an agent that has no workers, without a connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from elasticjob._runtime.contract.messages import (
    Announce,
    EndRound,
    Finish,
    Message,
    Outcome,
    PlanEnd,
    StartRound,
    StepReport,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkGate, LinkRole, Welcome
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store_pod.config import StoreConfig
from elasticjob._runtime.store_pod.coordinator import Coordinator
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

ROUND_STORE_PORT = 20000
"""What a node reports. No program listens there."""
RECEIVED = memoryview(bytearray(256 * 1024))
"""For all servers of this process: each of its own would be a quarter of a MiB."""


class SimulatedStore:
    """The process of one store pod."""

    def __init__(self, config: StoreConfig, address: str) -> None:
        self.config = config
        self.address = address
        settings, now = config.settings, time.monotonic()
        self.coordinator = Coordinator(
            initial_state(
                settings,
                attempt=config.attempt,
                store=config.incarnation,
                now=now,
                epoch=time.time() - now,
                recovering=config.incarnation > 0,
                standby=config.standby,
            )
        )
        gate = LinkGate(
            welcome=Welcome(config.run_id, config.attempt, config.incarnation),
            keys={LinkRole.AGENT: config.node_key, LinkRole.OPERATOR: config.operator_key},
            serve=self.coordinator.serve,
            keep_alive=KeepAlive(settings.keep_alive_interval, settings.keep_alive_max_attempts),
            passive=lambda: self.coordinator.state.passive,
        )
        self._server = StoreServer(links=gate.accept, clients=config.clients)
        self._server.received = RECEIVED

    async def start(self) -> None:
        """Listen. OSError: another program listens on this port at all addresses."""
        await self._server.start(self.address, self.config.port)
        self.coordinator.start()

    async def close(self) -> None:
        self.coordinator.stop()
        await self._server.close()

    @property
    def view_generation(self) -> int:
        """The generation of the operator whose view the store has; -1 without one."""
        return self.coordinator.state.operator_view.lease


class NodeLink:
    """What a coordinator uses of a node's `ControlLink`."""

    role = LinkRole.AGENT
    peer = "a simulated node"

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()

    def deliver(self, message: Message) -> None:
        """Send a message to the coordinator."""
        self._sent.put_nowait(message)

    async def receive(self) -> Message | None:
        return await self._sent.get()

    def send(self, message: Message) -> None:
        self._on_message(message)

    def close(self) -> None:
        self._sent.put_nowait(None)


@dataclass
class SimulatedNode:
    """The agent in one worker pod. `on_finish` is called when the coordinator has declared the job's end."""

    pod: str
    index: int
    incarnation: int
    address: str
    on_finish: Callable[[], None]
    round: RoundId | None = None
    """Its last round."""
    ends: bool = False
    """Whether its workers end well: in this round, and in the next one if this one ends before."""
    _link: NodeLink = field(init=False)
    _served: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._link = NodeLink(self._receive)

    def join(self, coordinator: Coordinator) -> None:
        """Connect and announce itself, with its imports done."""
        self._served = asyncio.create_task(coordinator.serve(cast(ControlLink, self._link)))
        announce = Announce(
            self.index, self.incarnation, self.pod, self.pod, self.address, ROUND_STORE_PORT, 1, ready=True
        )
        self._link.deliver(announce)

    def succeed(self) -> None:
        """Report that all workers have ended well, now or once they have started."""
        self.ends = True
        if self.round is not None:
            self._link.deliver(WorkersSucceeded(self.round))

    def leave(self) -> None:
        """Lose the link, as at the end of the agent's process."""
        self._link.close()

    def _receive(self, message: Message) -> None:
        match message:
            case StartRound(round=started):
                self.round = started
                self._link.deliver(WorkersStarted(started))
                if self.ends:
                    self.succeed()
            case PlanEnd(round=planned):
                self._link.deliver(StepReport(planned, None))
            case EndRound(round=ended):
                self._link.deliver(WorkersStopped(ended, ROUND_STORE_PORT))
            case Finish(outcome=Outcome.SUCCEEDED):
                self.on_finish()
            case _:
                return  # a node without workers has nothing to do

"""A node's stay at the coordinator, in a thread of its own, for a caller that blocks. No torch here.

What to make of the coordinator's words is the agent's own machine; its workers are whatever the caller starts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from elasticjob.agent.machine import decide as machine
from elasticjob.agent.machine import events
from elasticjob.agent.machine.effects import (
    Effect,
    Exit,
    HoldWorkers,
    LaunchWorkers,
    Log,
    Send,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob.agent.machine.events import AgentEvent
from elasticjob.agent.machine.state import AgentPhase, AgentState
from elasticjob.contract.messages import (
    Announce,
    Close,
    Closed,
    CoordinatorToNode,
    Failure,
    FailureClass,
    NodeToCoordinator,
    Standby,
    StartRound,
    Termination,
)
from elasticjob.control_link.link import ControlLink, LinkRefused
from elasticjob.control_link.node_client import NoCoordinatorError, NodeClient

log = logging.getLogger(__name__)

ORPHANED_AFTER = 1.0
"""Seconds: a link that only blinked is back by then."""
CLOSE_TIMEOUT = 5.0
"""Seconds that the thread has to say good-bye."""


class CoordinatorSession:
    """Everything that is not private may be read while `changed` is held, and is notified of through it."""

    def __init__(self, dial: Callable[[], Awaitable[ControlLink]], me: Announce, *, connect_timeout: float) -> None:
        """`connect_timeout`: seconds without a store after which `finish` says so, as long as no round was had."""
        self.changed = threading.Condition()
        self.start: StartRound | None = None
        """The round that the caller should be in."""
        self.must_stop = False
        """The round is over, or the stay is: the caller must end its workers."""
        self.finish: Termination | None = None
        """The stay is over: nothing more will be heard."""
        self.closed = ""
        """Why no round will form any more."""
        self.redundant = False
        """A round is full without this node."""
        self.messages_received = 0
        """Messages of the coordinator."""
        self.down_since: float | None = time.monotonic()
        """When the link was lost (monotonic seconds); None while it is up."""
        self._closing = ""
        self._dial = dial
        self._state = AgentState(announcement=me, stop_grace=0.0, launcher_ready=True)
        self._node = NodeClient(
            self._connect,
            self._greeting,
            self._hear,
            had_round=lambda: self._state.assignment is not None,
            join_timeout=connect_timeout,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"elasticjob-{me.pod}", daemon=True)
        self._thread.start()

    @property
    def orphaned(self) -> bool:
        """Closed, and whoever hosted the store has gone since: nobody is left to say that the round has ended."""
        down = self.down_since
        return bool(self.closed) and down is not None and time.monotonic() > down + ORPHANED_AFTER

    # ---- for the caller's thread -----------------------------------------------------------------------------------

    def started(self, start: StartRound) -> None:
        """The caller's workers of the round are about to run."""
        self._soon(self._dispatch, events.WorkersLaunched(start.round))

    def leave_round(self, store_port: int, why: str) -> None:
        """No worker of the last round is left; `store_port` is the one for the next. `why` if it did not end for all.

        Returns once `start` is no longer the old round.
        """
        left = threading.Event()
        if self._soon(self._leave_round, store_port, why, left):
            left.wait(CLOSE_TIMEOUT)

    def withdraw(self) -> None:
        """Give up a join; `finish` is set once the coordinator knows."""
        self._soon(self._dispatch, events.SignalReceived("JoinTimeout"))

    def close_rendezvous(self, why: str) -> None:
        """Ask for the end of all rounds; `closed` is set once that is so."""
        self._soon(self._close_rendezvous, why)

    def close(self) -> None:
        """Close the link and end the thread. What was said before is still sent."""
        self._soon(self._cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def _soon(self, call: Callable[..., object], *args: object) -> bool:
        """False once the thread has ended; `finish` says why, unless it was `end`."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    # ---- in the session's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._node.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except NoCoordinatorError as error:
            self._dispatch(events.StoreUnreachable(str(error)))
            self._dispatch(events.AllWorkersStopped(0))  # nobody will hear the caller say so
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # closed links hand over what they still hold
            self._loop.close()

    def _cancel(self) -> None:
        self._task.cancel()

    async def _connect(self) -> ControlLink:
        with self.changed:
            self.down_since = self.down_since or time.monotonic()
            self.changed.notify_all()
        try:
            link = await self._dial()
        except LinkRefused as error:
            raise NoCoordinatorError(str(error)) from error
        with self.changed:
            self.down_since = None
        return link

    def _greeting(self) -> list[NodeToCoordinator]:
        closing = self._closing or self.closed
        return [*machine.greeting(self._state), *([Close(closing)] if closing else [])]

    def _hear(self, message: CoordinatorToNode) -> None:
        with self.changed:
            self.messages_received += 1
            if isinstance(message, Closed):
                self.closed = message.reason
            if isinstance(message, Standby):
                self.redundant = message.redundant
            self._dispatch(events.Received(message))
            self.changed.notify_all()

    def _leave_round(self, store_port: int, why: str, left: threading.Event) -> None:
        with self.changed:
            round_ = self._state.round
            if round_ is not None and self._state.phase in (AgentPhase.STARTING, AgentPhase.RUNNING):
                # The caller knows that its workers failed, not whether that was the cause or an effect.
                failure = Failure(
                    FailureClass.COLLECTIVE_FAILED, self._state.announcement.pod, time.time(), message=why
                )
                self._dispatch(events.WorkerEnded(round_, 0, failure))
            self.start = None
            if self._state.phase is AgentPhase.STOPPING:
                self.must_stop = False
                self._dispatch(events.AllWorkersStopped(store_port))
        left.set()

    def _close_rendezvous(self, why: str) -> None:
        self._closing = why
        self._node.send(Close(why))

    def _dispatch(self, event: AgentEvent) -> None:
        with self.changed:
            decision = machine.decide(self._state, event)
            self._state = decision.state
            for effect in decision.effects:
                self._do(effect)
            self.changed.notify_all()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._node.send(message)
            case LaunchWorkers(start):
                self.start, self.must_stop, self.redundant = start, False, False
            case HoldWorkers(round_id):
                self._dispatch(events.WorkersHeld(round_id, None))  # torchrun's workers report to nobody
            case StopWorkersAt(round_id):
                self._dispatch(events.LastStepMissed(round_id))
            case StopWorkers():
                self.must_stop = True
            case StartLeaveTimer(seconds):
                self._loop.call_later(seconds, self._dispatch, events.LeaveTimedOut())
            case Log(text):
                log.info("%s", text)
            case Exit():
                self.must_stop, self.finish = True, effect.termination

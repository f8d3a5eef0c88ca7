"""A node's session with the coordinator, in a thread of its own, for a caller that blocks. It does not import torch.

The agent's state machine decides how the node reacts to the coordinator's messages. The caller starts and stops the
workers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from elasticjob._runtime.agent.state_machine import decide as machine
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.effects import (
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
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.state import AgentPhase, AgentState
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    Close,
    Closed,
    CoordinatorToAgent,
    EndRound,
    Failure,
    FailureClass,
    Outcome,
    PlanEnd,
    Standby,
    StartRound,
    Termination,
)
from elasticjob._runtime.control_link.coordinator_client import CoordinatorClient, NoCoordinatorError
from elasticjob._runtime.control_link.link import ControlLink, LinkError
from elasticjob._runtime.system.daemon_threads import DaemonExecutor
from elasticjob._runtime.system.loop_errors import call_on_error

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0
"""Seconds that the caller waits for the session's thread."""


class CoordinatorSession:
    """The session of one node, from the first announcement to the termination.

    Hold `changed` to read the public attributes. `changed` is notified after each change.
    """

    def __init__(
        self, dial: Callable[[], Awaitable[ControlLink]], announcement: Announce, *, connect_timeout: float
    ) -> None:
        """`connect_timeout`: seconds without a store before the first round after which `termination` is an error."""
        self.changed = threading.Condition()
        self.start: StartRound | None = None
        """The round that the caller must join; None while there is none."""
        self.must_stop = False
        """Whether the caller must stop its workers: the round or the session has ended."""
        self.round_ending = False
        """Whether the coordinator has sent the end of the round that `start` names."""
        self.termination: Termination | None = None
        """How the session ended: no more messages will arrive. None until then."""
        self.closed = ""
        """Why the rendezvous is closed: no more rounds will form. Empty while it is open."""
        self.redundant = False
        """Whether a round is full without this node. Not changed any more once the rendezvous is closed."""
        self.messages_received = 0
        """Number of messages from the coordinator."""
        self.down_since: float | None = time.monotonic()
        """When the link was lost, in monotonic seconds; None while the link is up."""
        self.problem = ""
        """Why the last attempt to connect failed. Empty if none has."""
        self._closing = ""
        self._dial = dial
        self._state = AgentState(announcement=announcement, stop_grace=0.0, launcher_ready=True)
        self.client = CoordinatorClient(
            self._connect,
            self.greeting,
            self.receive,
            had_round=lambda: self._state.assignment is not None,
            join_timeout=connect_timeout,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor())
        self.thread = threading.Thread(target=self._run, name=f"elasticjob-{announcement.pod}", daemon=True)
        self.thread.start()

    # ---- called from the caller's thread ---------------------------------------------------------------------------

    def started(self, start: StartRound) -> None:
        """Report that the caller starts the workers of the round."""
        self.schedule(self._dispatch, events.WorkersLaunched(start.round))

    def leave_round(self, store_port: int, why: str) -> None:
        """Report that no worker of the last round is left. Return once `start` is no longer that round.

        `store_port`: where this node serves the store of the next round. `why`: the message of the failure that is
        reported if the coordinator has not ended the round.
        """
        done = threading.Event()
        if self.schedule(self._leave_round, store_port, why, done):
            done.wait(CLOSE_TIMEOUT)

    def withdraw(self) -> None:
        """Withdraw the join. `termination` is set once the coordinator has confirmed it."""
        self.schedule(self._dispatch, events.SignalReceived("JoinTimeout"))

    def close_rendezvous(self, why: str) -> None:
        """Ask the coordinator to close the rendezvous. `closed` is set once it has."""
        self.schedule(self._close_rendezvous, why)

    def shut_down(self, why: str, failure: str) -> None:
        """Close the rendezvous for good: no worker of this node is left, and it joins no further round.

        `failure`: why its workers did not succeed; the coordinator then ends the round. Empty if they succeeded: the
        other nodes continue without this one.
        """
        self.schedule(self._shut_down, why, failure)

    def close(self) -> None:
        """Close the link and end the thread. Messages that wait to be sent are sent first."""
        self.schedule(self._cancel)
        if threading.current_thread() is not self.thread:
            self.thread.join(CLOSE_TIMEOUT)

    def schedule(self, call: Callable[..., object], *args: object) -> bool:
        """Run `call` in the session's thread. Return False if the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    # ---- called in the session's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.client.run())
        call_on_error(self._loop, self._fail)
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except NoCoordinatorError as error:
            self._dispatch(events.StoreUnreachable(str(error)))
            self._dispatch(events.AllWorkersStopped(0))  # the caller can report it no more: this thread ends
        except Exception as error:
            log.exception("the connection to the coordinator has failed")
            self._fail(error)
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # closed links flush their buffers
            self._loop.close()

    def _cancel(self) -> None:
        self._task.cancel()

    def _fail(self, error: BaseException) -> None:
        """End the session after an error that nothing handled: the caller waits for what may never come."""
        with self.changed:
            text = f"{type(error).__name__}: {error}"
            self.termination = self.termination or Termination(Outcome.ERROR, "AgentBroke", message=text)
            self.must_stop = True
            self.changed.notify_all()
        self._cancel()

    async def _connect(self) -> ControlLink:
        with self.changed:
            self.down_since = self.down_since or time.monotonic()
            self.changed.notify_all()
        try:
            link = await self._dial()
        except (OSError, LinkError) as error:
            with self.changed:
                self.problem = str(error) or type(error).__name__
            raise
        with self.changed:
            self.down_since = None
        return link

    def greeting(self) -> list[AgentToCoordinator]:
        closing = self._closing or self.closed
        return [*machine.greeting(self._state), *([Close(closing)] if closing else [])]

    def receive(self, message: CoordinatorToAgent) -> None:
        with self.changed:
            self.messages_received += 1
            if isinstance(message, Closed):
                self.closed = message.reason
            if isinstance(message, Standby) and not self.closed:
                # A node that arrives at a closed rendezvous is no standby: torch gives it another error.
                self.redundant = message.redundant
            if isinstance(message, (PlanEnd, EndRound)):
                self.round_ending = True
            self._dispatch(events.Received(message))
            self.changed.notify_all()

    def _leave_round(self, store_port: int, why: str, done: threading.Event) -> None:
        with self.changed:
            round_ = self._state.round
            if round_ is not None and self._state.phase in (AgentPhase.STARTING, AgentPhase.RUNNING):
                self._dispatch(events.WorkerEnded(round_, 0, self._failure(why)))
            self.start = None
            if self._state.phase is AgentPhase.STOPPING:
                self.must_stop = False
                self._dispatch(events.AllWorkersStopped(store_port))
        done.set()

    def _failure(self, why: str) -> Failure:
        # The caller does not know whether its workers' failure is the root cause or an effect of another one.
        return Failure(FailureClass.COLLECTIVE_FAILED, self._state.announcement.pod, time.time(), message=why)

    def _shut_down(self, why: str, failure: str) -> None:
        """Report how the workers ended, then close: the coordinator handles both in this order.

        The caller may end the store as soon as `closed` is set.
        """
        if self._state.round is not None:
            self._dispatch(events.WorkerEnded(self._state.round, 0, self._failure(failure) if failure else None))
        self._close_rendezvous(why)
        self._dispatch(events.AllWorkersStopped(0))

    def _close_rendezvous(self, why: str) -> None:
        self._closing = why
        self.client.send(Close(why))

    def _dispatch(self, event: AgentEvent) -> None:
        with self.changed:
            decision = machine.decide(self._state, event)
            self._state = decision.state
            for effect in decision.effects:
                self._execute(effect)
            self.changed.notify_all()

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self.client.send(message)
            case LaunchWorkers(start):
                self.start, self.must_stop, self.round_ending, self.redundant = start, False, False, False
            case HoldWorkers(round_id):
                self._dispatch(events.WorkersHeld(round_id, None))  # torchrun's workers report no steps
            case StopWorkersAt(round_id):
                self._dispatch(events.LastStepMissed(round_id))
            case StopWorkers():
                self.must_stop = True
            case StartLeaveTimer(seconds):
                self._loop.call_later(seconds, self._dispatch, events.LeaveTimedOut())
            case Log(text):
                log.info("%s", text)
            case Exit():
                self.must_stop, self.termination = True, effect.termination

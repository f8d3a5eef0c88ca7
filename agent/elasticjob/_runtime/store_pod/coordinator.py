"""The coordinator of one job: it carries the decisions of `rendezvous.rounds` over control links.

`rounds` is pure; this module has the state and the I/O. Messages of agents and operators, closed links and deadlines
become events. Up to AT_ONCE events of one turn of the event loop are decided together. Then messages go to the agents,
a report goes to the operators, and the timer is set to the next deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob._runtime.contract.messages import (
    Announce,
    Close,
    CoordinatorToAgent,
    Leaving,
    Message,
    NewerStore,
    NodeResultsEnded,
    OperatorView,
    QueryClosed,
    Ready,
    Report,
    StageBegan,
    StageEnded,
    StateReceived,
    StateTransfer,
    StepReport,
    StepTimes,
    StoreToAgent,
    TrainingProgress,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.control_link.link import ControlLink, LinkRole
from elasticjob._runtime.rendezvous import standby_store
from elasticjob._runtime.rendezvous.event_batch import Settled
from elasticjob._runtime.rendezvous.observations import counting_report, lost_time, recovery_times, stragglers
from elasticjob._runtime.rendezvous.observations.counting_report import CountingReport
from elasticjob._runtime.rendezvous.observations.report import build_report
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import (
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    NewerStoreSeen,
    OperatorViewReceived,
    SendToAgent,
    Tick,
)

log = logging.getLogger(__name__)

REPORT_SECONDS_PER_AGENT = 0.0001
"""Seconds from one report to the next, for each agent in the report. The cost of a report grows with its agents, so
reports take a small part of the processor, here and at the operator, however often agents connect and disconnect."""
PROGRESS_SECONDS = 30.0
"""Seconds from one report to the next that differs in the training's progress only: each costs the operator requests to
the API server."""
AT_ONCE = 256
"""Events decided, and messages sent, before the event loop serves what has arrived in the meantime. To answer 4096
agents at once takes 0.3 s."""
STANDBY_TIMEOUT = 10.0
"""Seconds that an ending store waits for a standby store. On a cluster with one Node no standby store exists. To give
up costs little: the drain of a worker pod beside the store is then handled like a lost member."""


@dataclass
class Coordinator:
    """Owner of the coordinator's state. `serve` must be called for every link."""

    state: CoordinatorState
    dropped: int = 0
    """Messages that their sender was not allowed to send."""
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an agent has reported a newer store: the server of this store must close it."""
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each decision."""
    _agents: dict[str, ControlLink] = field(default_factory=dict)
    """Links of agents, by agent id."""
    _operators: list[ControlLink] = field(default_factory=list)
    _events: list[CoordinatorEvent] = field(default_factory=list)
    """Events that are not decided yet."""
    _scheduled: bool = False
    """Whether `_run` is scheduled."""
    _settled: Settled | None = None
    """What is known of the state after the last decision, for the next one."""
    _unsent: deque[tuple[ControlLink, CoordinatorToAgent | StoreToAgent]] = field(default_factory=deque)
    """Messages that wait until others have been sent."""
    _timer: asyncio.TimerHandle | None = None
    """Runs until the next deadline of the rules."""
    _deadline: float | None = None
    """That deadline."""
    _last_report: Report | None = None
    _report_timer: asyncio.TimerHandle | None = None
    """Runs until the next report may be made."""
    _report_waits: bool = False
    """Whether something has changed since the last report was made."""
    _progress: CountingReport | None = None
    _progress_at: float = 0.0
    """When a report may be sent for the training's progress alone."""
    _progress_timer: asyncio.TimerHandle | None = None
    """Runs until then, if there is a progress to report."""
    _state_transfer: StateTransfer | None = None
    _outage: recovery_times.Outage | None = None
    _lost_time: lost_time.LostTimeTracker = field(default_factory=lost_time.LostTimeTracker)
    _straggler_tracker: stragglers.StragglerTracker = field(default_factory=stragglers.StragglerTracker)

    def start(self) -> None:
        """Start the timer of the rules. Needs the running event loop."""
        self._submit(Tick())

    def stop(self) -> None:
        """Send what waits, and stop all timers."""
        for link, message in self._unsent:
            link.send(message)
        self._unsent.clear()
        if self._report_timer is not None:
            self._report_timer.cancel()
            self.report_again()
        for timer in (self._timer, self._report_timer, self._progress_timer):
            if timer is not None:
                timer.cancel()

    async def wait_until_it_may_end(self) -> None:
        """Return when the store may end without cost for its agents, or when no standby store has come in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STANDBY_TIMEOUT
        while not standby_store.may_end(self.state, without_standby=(left := deadline - loop.time()) <= 0):
            self._decided.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._decided.wait(), left if left > 0 else None)

    async def serve(self, link: ControlLink) -> None:
        """Serve one peer until its link closes. LinkError: the peer sent an invalid message; the caller counts it."""
        if link.role is LinkRole.OPERATOR:
            await self._serve_operator(link)
        else:
            await self._serve_agent(link)

    async def _serve_operator(self, link: ControlLink) -> None:
        self._operators.append(link)
        link.send(self._report(time.monotonic()))
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, OperatorView):
                    self._submit(OperatorViewReceived(message))
                else:
                    self._ignore(link, message)
        finally:
            self._operators.remove(link)

    async def _serve_agent(self, link: ControlLink) -> None:
        first = await link.receive()
        if isinstance(first, NewerStore):
            self._submit(NewerStoreSeen(first.incarnation))
            return
        if isinstance(first, Announce):
            agent_id = first.agent_id
        elif isinstance(first, (Close, QueryClosed)):
            agent_id = f"visitor@{link.peer}"
        else:
            self._ignore(link, first)
            return
        older = self._agents.get(agent_id)
        self._agents[agent_id] = link
        if older is not None:
            older.close()
        self._submit(AgentMessage(agent_id, first))
        try:
            await self._receive_messages(link, agent_id)
        finally:
            # An agent that has reconnected over a new link is not disconnected.
            if self._agents.get(agent_id) is link:
                del self._agents[agent_id]
                self._submit(AgentDisconnected(agent_id))

    async def _receive_messages(self, link: ControlLink, agent_id: str) -> None:
        while (message := await link.receive()) is not None:
            if self._agents.get(agent_id) is not link:
                return
            match message:
                case Ready() | WorkersStarted() | WorkersFailed() | WorkersSucceeded():
                    self._submit(AgentMessage(agent_id, message))
                case StageBegan() | StageEnded() | NodeResultsEnded() | WorkersStopped():
                    self._submit(AgentMessage(agent_id, message))
                case Announce(agent_id=announced) if announced == agent_id:
                    self._submit(AgentMessage(agent_id, message))
                case Leaving() | Close() | QueryClosed() | StepReport() | WorkersStalled():
                    self._submit(AgentMessage(agent_id, message))
                case StepTimes():
                    self._track_step_times(agent_id, message)
                case TrainingProgress():
                    self._record_progress(agent_id, message)
                case StateReceived():
                    self._record_transfer(agent_id, message)
                case _:
                    self._ignore(link, message)

    def _ignore(self, link: ControlLink, message: Message | None) -> None:
        """Count and log a message that the peer may not send now. None means that the link has closed."""
        if message is not None:
            self.dropped += 1
            name = type(message).__name__
            log.warning("ignored a message of type %s from %s %s: not allowed here", name, link.role.value, link.peer)

    def _track_step_times(self, agent_id: str, times: StepTimes) -> None:
        # Not an event for the rules: they do not depend on step times, and every agent sends them regularly.
        now, before = time.monotonic(), self._straggler_tracker.straggler
        self._straggler_tracker = stragglers.track_step_times(self._straggler_tracker, self.state, agent_id, times, now)
        if self._straggler_tracker.straggler != before:
            self._report_change(now)

    def _record_progress(self, agent_id: str, progress: TrainingProgress) -> None:
        # Not an event for the rules, as above.
        round_ = self.state.round
        if round_ is None or round_.id != progress.round or agent_id not in round_.members:
            return
        if counting_report.counts(self._progress, progress, agent_id):
            now, self._progress = time.monotonic(), CountingReport(progress, agent_id)
            self._lost_time = lost_time.track_step(self._lost_time, progress, now)
            self._report_change(now)

    def _record_transfer(self, agent_id: str, received: StateReceived) -> None:
        # Not an event for the rules, as above.
        round_, agent, last = self.state.round, self.state.agents.get(agent_id), self._state_transfer
        if round_ is None or agent is None or round_.id != received.round or agent_id not in round_.members:
            return
        if last is None or last.received.round != received.round or last.received.seconds < received.seconds:
            self._state_transfer = StateTransfer(received, agent.pod, time.time())
            self._report_change(time.monotonic())

    def _submit(self, event: CoordinatorEvent) -> None:
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = bool(self._events[AT_ONCE:])
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._run)
        now = time.monotonic()
        events, self._events = self._events[:AT_ONCE], self._events[AT_ONCE:]
        decision = rounds.decide_together(self.state, events, now, self._settled)
        self._outage = recovery_times.track_outage(self._outage, self.state, decision.state, now)
        self._lost_time = lost_time.track_rounds(self._lost_time, self._outage, decision.state, now)
        self.state = decision.state
        self._settled = decision.settled or rounds.settle(self.state, now)
        if decision.reason:
            log.info("%s", decision.reason)
        self._send_effects(decision.effects)
        self._report_change(now)
        self._set_timer(self._settled.until)
        self._decided.set()
        if self.state.newer_store is not None:
            self.superseded.set()

    def _send_effects(self, effects: Iterable[SendToAgent]) -> None:
        """Send messages after those that wait already. The answer to an `Announce` replaces those of an older link."""
        idle = not self._unsent
        self._unsent += [(link, e.message) for e in effects if (link := self._agents.get(e.agent_id)) is not None]
        if idle:
            self._send_some()

    def _send_some(self) -> None:
        for _ in range(min(AT_ONCE, len(self._unsent))):
            link, message = self._unsent.popleft()
            link.send(message)
        if self._unsent:
            asyncio.get_running_loop().call_soon(self._send_some)

    def _report(self, now: float) -> Report:
        recovery = self._outage.recovery if self._outage else None
        straggler = stragglers.current_straggler(self._straggler_tracker, self.state)
        lost = self._lost_time.lost
        progress = self._progress.progress if self._progress is not None else None
        return build_report(self.state, now, recovery, straggler, progress, lost, self._state_transfer)

    def _report_change(self, now: float) -> None:
        """Send the operators a report if it has changed: the first change at once, those that follow it together."""
        if self._report_timer is not None:
            self._report_waits = True
            return
        report = self._report(now)
        # It costs the same if nothing in it has changed.
        pause = REPORT_SECONDS_PER_AGENT * len(report.nodes)
        self._report_timer = asyncio.get_running_loop().call_later(pause, self.report_again)
        if report == self._last_report or self._waits_for_progress(report, now):
            return
        self._last_report, self._progress_at = report, now + PROGRESS_SECONDS
        for link in self._operators:
            link.send(report)

    def _waits_for_progress(self, report: Report, now: float) -> bool:
        """Return whether only the training's progress has changed, and it is too early to report that again."""
        last = self._last_report
        if last is None or last.progress is None or replace(report, progress=last.progress) != last:
            return False
        if now < self._progress_at and self._progress_timer is None:
            wait = self._progress_at - now
            self._progress_timer = asyncio.get_running_loop().call_later(wait, self._report_progress)
        return now < self._progress_at

    def _report_progress(self) -> None:
        self._progress_timer = None
        self._report_change(time.monotonic())

    def report_again(self) -> None:
        self._report_timer = None
        if self._report_waits:
            self._report_waits = False
            self._report_change(time.monotonic())

    def _set_timer(self, deadline: float | None) -> None:
        if deadline == self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._deadline = None, deadline
        if deadline is not None:
            # The event loop's clock is time.monotonic, with a coarser resolution: 1 ms later the deadline has passed.
            self._timer = asyncio.get_running_loop().call_at(deadline + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = self._deadline = None
        self._submit(Tick())

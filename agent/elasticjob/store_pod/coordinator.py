"""Carries the decisions of `rounds` over control links: one per job, in the store's process."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from elasticjob.contract.messages import (
    Announce,
    Close,
    Leaving,
    Message,
    NewerStore,
    OperatorView,
    Ready,
    Report,
    StepReport,
    StepTimes,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.control_link.link import ControlLink, LinkError, LinkRole
from elasticjob.rendezvous import recovery_times, rounds, stragglers
from elasticjob.rendezvous.report import build_report
from elasticjob.rendezvous.state import (
    CoordinatorEvent,
    CoordinatorState,
    NewerStoreSeen,
    NodeDisconnected,
    NodeMessage,
    OperatorViewReceived,
    Tick,
)

log = logging.getLogger(__name__)

REPORT_PACE = 0.0001
"""Seconds between two reports for each node in them: what one costs grows with its length, and all together they stay
a small part of the processor, here and at the operator, however fast nodes come and go."""


@dataclass
class Coordinator:
    """Owns the state. Events that arrive together are taken in together, and settled once."""

    state: CoordinatorState
    dropped: int = 0
    """Messages that a peer had no business to send."""
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a newer store has been heard of: whoever serves this one closes it."""
    _nodes: dict[str, ControlLink] = field(default_factory=dict)
    _operators: list[ControlLink] = field(default_factory=list)
    _events: list[CoordinatorEvent] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _scheduled: bool = False
    _last_report: Report | None = None
    _resting: asyncio.TimerHandle | None = None
    """Runs until the next report may be sent."""
    _outage: recovery_times.Outage | None = None
    _pace: stragglers.StragglerTracker = field(default_factory=stragglers.StragglerTracker)

    def start(self) -> None:
        """Begin to keep time (needs the running loop)."""
        self._submit(Tick())

    def stop(self) -> None:
        for timer in (self._timer, self._resting):
            if timer is not None:
                timer.cancel()

    async def serve(self, link: ControlLink) -> None:
        """Talk to one peer until its link closes."""
        try:
            if link.role is LinkRole.OPERATOR:
                await self._serve_operator(link)
            else:
                await self._serve_node(link)
        except LinkError as error:
            log.warning("dropped %s: %s", link.peer, error)

    async def _serve_operator(self, link: ControlLink) -> None:
        self._operators.append(link)
        link.send(self._report(time.monotonic()))
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, OperatorView):
                    self._submit(OperatorViewReceived(message))
                else:
                    self._drop(link, message)
        finally:
            self._operators.remove(link)

    async def _serve_node(self, link: ControlLink) -> None:
        first = await link.receive()
        if isinstance(first, NewerStore):
            self._submit(NewerStoreSeen(first.incarnation))
            return
        if not isinstance(first, Announce):
            self._drop(link, first)
            return
        agent_id = first.agent_id
        older = self._nodes.get(agent_id)
        self._nodes[agent_id] = link
        if older is not None:
            older.close()
        self._submit(NodeMessage(agent_id, first))
        try:
            await self._listen(link, agent_id)
        finally:
            # A node that came back over a new link has not gone.
            if self._nodes.get(agent_id) is link:
                del self._nodes[agent_id]
                self._submit(NodeDisconnected(agent_id))

    async def _listen(self, link: ControlLink, agent_id: str) -> None:
        while (message := await link.receive()) is not None:
            if self._nodes.get(agent_id) is not link:
                return
            match message:
                case Ready() | WorkersStarted() | WorkersFailed() | WorkersSucceeded() | WorkersStopped():
                    self._submit(NodeMessage(agent_id, message))
                case Leaving() | Close() | StepReport() | WorkersStalled():
                    self._submit(NodeMessage(agent_id, message))
                case StepTimes():
                    self._take_times(agent_id, message)
                case _:
                    self._drop(link, message)

    def _drop(self, link: ControlLink, message: Message | None) -> None:
        self.dropped += message is not None
        log.warning("dropped %s from %s: not for it to say", type(message).__name__, link.peer)

    def _take_times(self, agent_id: str, times: StepTimes) -> None:
        """Beside the rules, which do not depend on it: every node says this again and again."""
        now, named = time.monotonic(), self._pace.straggler
        self._pace = stragglers.track_step_times(self._pace, self.state, agent_id, times, now)
        if self._pace.straggler != named:
            self._tell_operators(now)

    def _submit(self, event: CoordinatorEvent) -> None:
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        now = time.monotonic()
        events, self._events = self._events, []
        decision = rounds.decide_together(self.state, events, now)
        self._outage = recovery_times.track_outage(self._outage, self.state, decision.state, now)
        self.state = decision.state
        if decision.reason:
            log.info("%s", decision.reason)
        for effect in decision.effects:
            if (link := self._nodes.get(effect.agent_id)) is not None:
                link.send(effect.message)
        self._tell_operators(now)
        self._set_timer(now)
        if self.state.newer_store is not None:
            self.superseded.set()

    def _report(self, now: float) -> Report:
        recovery = self._outage.recovery if self._outage else None
        return build_report(self.state, now, recovery, stragglers.current_straggler(self._pace, self.state))

    def _tell_operators(self, now: float) -> None:
        """The first change at once, those that follow it together."""
        if self._resting is not None:
            return
        report = self._report(now)
        if report == self._last_report:
            return
        self._last_report = report
        for link in self._operators:
            link.send(report)
        self._resting = asyncio.get_running_loop().call_later(REPORT_PACE * len(report.nodes), self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._tell_operators(time.monotonic())

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = rounds.next_deadline(self.state, now)
        if due is not None:
            # asyncio's clock is time.monotonic; a hair later, so that the deadline has surely come.
            self._timer = asyncio.get_running_loop().call_at(due + 0.001, self._submit, Tick())

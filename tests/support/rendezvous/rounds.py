"""A driver of the pure rules of rounds: tests script what nodes and the operator send, and read what nodes are sent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    CoordinatorToAgent,
    EndRound,
    ExpectedPod,
    Failure,
    FailureClass,
    Finish,
    LastMembership,
    Leaving,
    MemberState,
    OperatorView,
    PlanEnd,
    PodState,
    Ready,
    Report,
    RoundPhase,
    RoundSettings,
    StartRound,
    StoreToAgent,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.event_batch import Settled
from elasticjob._runtime.rendezvous.observations.report import build_report, round_phase
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import (
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    OperatorViewReceived,
    Tick,
    initial_state,
)

SETTINGS = RoundSettings(min_nodes=2, max_nodes=4, target=4, max_restarts=3)


def agent_id(index: int, incarnation: int = 0) -> str:
    return f"{index}.{incarnation}"


def announcement(index: int, membership: LastMembership | None = None, incarnation: int = 0) -> Announce:
    """The announcement of a node of one worker that is ready."""
    name, pod = agent_id(index, incarnation), f"j-{index}-{incarnation}"
    address, port = f"10.0.0.{index}", 5000 + index
    return Announce(index, incarnation, name, pod, address, port, 1, ready=True, membership=membership)


class Job:
    """A coordinator's state, a clock, and the messages sent to each node, by agent id."""

    def __init__(self, settings: RoundSettings = SETTINGS, *, store: int = 0, recovering: bool = False) -> None:
        self.now = 100.0
        self.state: CoordinatorState = initial_state(
            settings, attempt=1, store=store, now=self.now, recovering=recovering
        )
        self._settled: Settled | None = None
        self._settled_state = self.state
        self.sent: dict[str, list[CoordinatorToAgent | StoreToAgent]] = defaultdict(list)
        self.reasons: list[str] = []
        self.sequence = 0
        self.operator_confirms = False
        """Whether the operator confirms at once that this is the only store when it is asked."""
        self.decide(Tick())

    def decide(self, event: CoordinatorEvent) -> None:
        known = self._settled if self.state is self._settled_state else None
        decision = rounds.decide_together(self.state, (event,), self.now, known)
        self.state = self._settled_state = decision.state
        self._settled = decision.settled or rounds.settle(self.state, self.now)
        self.reasons.append(decision.reason)
        for send in decision.effects:
            self.sent[send.agent_id].append(send.message)
        if (
            self.operator_confirms
            and self.report.confirmation_request
            and self.state.operator_view.confirmed_request != self.report.confirmation_request
        ):
            self.confirm()

    def advance(self, seconds: float) -> None:
        """Advance the clock, with every tick that falls due on the way."""
        end = self.now + seconds
        while (due := rounds.next_deadline(self.state, self.now)) is not None and due <= end:
            self.now = due
            self.decide(Tick())
        self.now = end
        self.decide(Tick())

    # ---- the operator
    def confirm(self, request: float | None = None) -> None:
        """Confirm that this is the only store: the open request, or another one."""
        self.sequence += 1
        view = replace(
            self.state.operator_view,
            lease=1,
            sequence=self.sequence,
            confirmed_request=request or self.report.confirmation_request,
        )
        self.decide(OperatorViewReceived(view))

    def operator_view(
        self,
        *pods: ExpectedPod,
        charged: int = 0,
        charged_round: RoundId | None = None,
        charged_rounds: tuple[RoundId, ...] = (),
        charged_since: float = 0.0,
        finish: Finish | None = None,
        **settings: Any,
    ) -> None:
        self.sequence += 1
        self.operator_confirms = True
        changed = replace(self.state.settings, **settings)
        view = OperatorView(
            1, self.sequence, changed, charged, charged_round, pods, charged_rounds=charged_rounds,
            charged_since=charged_since, finish=finish,
        )  # fmt: skip
        self.decide(OperatorViewReceived(view))

    # ---- nodes
    def announce(
        self,
        *indices: int,
        incarnation: int = 0,
        ready: bool = True,
        workers: int = 1,
        membership: LastMembership | None = None,
    ) -> None:
        for index in indices:
            message = replace(announcement(index, membership, incarnation), ready=ready, local_world_size=workers)
            self.decide(AgentMessage(message.agent_id, message))

    def send(self, index: int, message: AgentToCoordinator, incarnation: int = 0) -> None:
        self.decide(AgentMessage(agent_id(index, incarnation), message))

    def started(self, *indices: int, incarnation: int = 0) -> None:
        for index in indices:
            self.send(index, WorkersStarted(self.start_of(index, incarnation).round), incarnation)

    def running(self, *indices: int) -> None:
        """Announce these nodes, and start the workers of the round."""
        self.announce(*indices)
        if self.state.round is None:
            self.advance(self.state.settings.last_call_timeout)
        self.started(*indices)

    def fail(
        self,
        index: int,
        kind: FailureClass = FailureClass.USER_ERROR,
        incarnation: int = 0,
        exception: str = "ValueError",
    ) -> None:
        start = self.start_of(index, incarnation)
        pod = f"j-{index}-{incarnation}"
        failure = Failure(kind, pod, self.now, rank=start.rank, exit_code=1, exception=exception)
        self.send(index, WorkersFailed(start.round, failure), incarnation)

    def succeed(self, *indices: int) -> None:
        for index in indices:
            self.send(index, WorkersSucceeded(self.start_of(index).round))

    def stopped(self, *indices: int, incarnation: int = 0) -> None:
        for index in indices:
            self.send(index, WorkersStopped(self.start_of(index, incarnation).round, 6000 + index), incarnation)

    def ready(self, index: int, incarnation: int = 0) -> None:
        self.send(index, Ready(), incarnation)

    def leave(self, index: int) -> None:
        self.send(index, Leaving("SIGTERM"))

    def disconnect(self, index: int, incarnation: int = 0) -> None:
        self.decide(AgentDisconnected(agent_id(index, incarnation)))

    # ---- what the coordinator did
    def start_of(self, index: int, incarnation: int = 0) -> StartRound:
        return next(m for m in reversed(self.sent[agent_id(index, incarnation)]) if isinstance(m, StartRound))

    def last(self, index: int, incarnation: int = 0) -> CoordinatorToAgent | StoreToAgent | None:
        messages = self.sent[agent_id(index, incarnation)]
        return messages[-1] if messages else None

    def sent_end(self, *indices: int) -> bool:
        return all(isinstance(self.last(index), EndRound | PlanEnd) for index in indices)

    def finished(self, index: int, incarnation: int = 0) -> Finish | None:
        last = self.last(index, incarnation)
        return last if isinstance(last, Finish) else None

    @property
    def members(self) -> list[str]:
        """Pods of the current round by group rank."""
        return [m.pod for m in self.state.round.members.values()] if self.state.round else []

    def phase(self) -> RoundPhase:
        return round_phase(self.state)

    @property
    def report(self) -> Report:
        return build_report(self.state, self.now)


def pods(*indices: int, state: PodState = PodState.RUNNING, incarnation: int = 0) -> tuple[ExpectedPod, ...]:
    return tuple(ExpectedPod(index, incarnation, f"j-{index}-{incarnation}", state) for index in indices)


def membership_of(start: StartRound, state: MemberState = MemberState.RUNNING) -> LastMembership:
    return LastMembership(start, state)


def job_of(*indices: int, target: int = 0, max_restarts: int = 3, **settings: Any) -> Job:
    """A job with a running round of these indices, and an operator that expects their pods."""
    job = Job()
    job.operator_view(*pods(*indices), target=target or len(indices), max_restarts=max_restarts, **settings)
    job.running(*indices)
    return job

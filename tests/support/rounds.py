"""A script-like driver of the pure rounds: says what nodes say, keeps what they are told."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from elasticjob.contract.messages import (
    Announce,
    CoordinatorToNode,
    EndRound,
    ExpectedPod,
    Failure,
    FailureClass,
    Finish,
    LastMembership,
    Leaving,
    MemberState,
    NodeToCoordinator,
    OperatorView,
    PlanEnd,
    PodState,
    Ready,
    Report,
    RoundPhase,
    RoundSettings,
    StartRound,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.report import build_report, round_phase
from elasticjob.rendezvous.state import (
    CoordinatorEvent,
    CoordinatorState,
    NodeDisconnected,
    NodeMessage,
    OperatorViewReceived,
    Tick,
    initial_state,
)

SETTINGS = RoundSettings(min_nodes=2, max_nodes=4, target=4, max_restarts=3)


def agent_id(index: int, incarnation: int = 0) -> str:
    return f"{index}.{incarnation}"


class Job:
    """One coordinator's state, a clock, and the mailboxes of its nodes (by index and incarnation)."""

    def __init__(self, settings: RoundSettings = SETTINGS, *, store: int = 0, recovering: bool = False) -> None:
        self.now = 100.0
        self.state: CoordinatorState = initial_state(
            settings, attempt=1, store=store, now=self.now, recovering=recovering
        )
        self.told: dict[str, list[CoordinatorToNode]] = defaultdict(list)
        self.reasons: list[str] = []
        self.sequence = 0
        self.operator = False
        """Whether one is here, and says that this is the only store when it is asked."""
        self.decide(Tick())

    def decide(self, event: CoordinatorEvent) -> None:
        decision = rounds.decide(self.state, event, self.now)
        self.state = decision.state
        self.reasons.append(decision.reason)
        for send in decision.effects:
            self.told[send.agent_id].append(send.message)
        if (
            self.operator
            and self.report.confirmation_request
            and self.state.operator_view.confirmed_request != self.report.confirmation_request
        ):
            self.answer()

    def later(self, seconds: float) -> None:
        """Let the clock run, with every tick that falls due on the way."""
        end = self.now + seconds
        while (due := rounds.next_deadline(self.state, self.now)) is not None and due <= end:
            self.now = due
            self.decide(Tick())
        self.now = end
        self.decide(Tick())

    # ---- the operator
    def answer(self, asks: float | None = None) -> None:
        """Say "you are the only store" to the last question, or to another one."""
        self.sequence += 1
        facts = replace(
            self.state.operator_view,
            lease=1,
            sequence=self.sequence,
            confirmed_request=asks or self.report.confirmation_request,
        )
        self.decide(OperatorViewReceived(facts))

    def facts(
        self,
        *pods: ExpectedPod,
        charged: int = 0,
        charged_round: RoundId | None = None,
        finish: Finish | None = None,
        **settings: Any,
    ) -> None:
        self.sequence += 1
        self.operator = True
        rules = replace(self.state.settings, **settings)
        self.decide(
            OperatorViewReceived(OperatorView(1, self.sequence, rules, charged, charged_round, pods, finish=finish))
        )

    # ---- nodes
    def announce(
        self,
        *indices: int,
        inc: int = 0,
        ready: bool = True,
        workers: int = 1,
        membership: LastMembership | None = None,
    ) -> None:
        for index in indices:
            message = Announce(
                index, inc, agent_id(index, inc), f"j-{index}-{inc}", f"10.0.0.{index}", 5000 + index, workers,
                ready=ready, membership=membership,
            )  # fmt: skip
            self.decide(NodeMessage(agent_id(index, inc), message))

    def say(self, index: int, message: NodeToCoordinator, inc: int = 0) -> None:
        self.decide(NodeMessage(agent_id(index, inc), message))

    def started(self, *indices: int, inc: int = 0) -> None:
        for index in indices:
            self.say(index, WorkersStarted(self.start_of(index, inc).round), inc)

    def running(self, *indices: int) -> None:
        """Announce these nodes and let the round start."""
        self.announce(*indices)
        if self.state.round is None:
            self.later(self.state.settings.last_call_timeout)
        self.started(*indices)

    def fail(self, index: int, kind: FailureClass = FailureClass.USER_ERROR, inc: int = 0) -> None:
        start = self.start_of(index, inc)
        failure = Failure(kind, f"j-{index}-{inc}", self.now, rank=start.rank, exit_code=1, exception="ValueError")
        self.say(index, WorkersFailed(start.round, failure), inc)

    def succeed(self, *indices: int) -> None:
        for index in indices:
            self.say(index, WorkersSucceeded(self.start_of(index).round))

    def stopped(self, *indices: int, inc: int = 0) -> None:
        for index in indices:
            self.say(index, WorkersStopped(self.start_of(index, inc).round, 6000 + index), inc)

    def ready(self, index: int, inc: int = 0) -> None:
        self.say(index, Ready(), inc)

    def leave(self, index: int) -> None:
        self.say(index, Leaving("SIGTERM"))

    def gone(self, index: int, inc: int = 0) -> None:
        self.decide(NodeDisconnected(agent_id(index, inc)))

    # ---- what is seen
    def start_of(self, index: int, inc: int = 0) -> StartRound:
        return next(m for m in reversed(self.told[agent_id(index, inc)]) if isinstance(m, StartRound))

    def last(self, index: int, inc: int = 0) -> CoordinatorToNode | None:
        messages = self.told[agent_id(index, inc)]
        return messages[-1] if messages else None

    def told_to_end(self, *indices: int) -> bool:
        return all(isinstance(self.last(s), EndRound | PlanEnd) for s in indices)

    def finished(self, index: int, inc: int = 0) -> Finish | None:
        last = self.last(index, inc)
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


def pods(*indices: int, state: PodState = PodState.RUNNING, inc: int = 0) -> tuple[ExpectedPod, ...]:
    return tuple(ExpectedPod(s, inc, f"j-{s}-{inc}", state) for s in indices)


def member_of(start: StartRound, state: MemberState = MemberState.RUNNING) -> LastMembership:
    return LastMembership(start, state)


def job_of(*indices: int, target: int = 0, max_restarts: int = 3, **settings: Any) -> Job:
    """A job whose round of these indices runs, with an operator that knows their pods."""
    job = Job()
    job.facts(*pods(*indices), target=target or len(indices), max_restarts=max_restarts, **settings)
    job.running(*indices)
    return job

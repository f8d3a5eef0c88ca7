"""A script-like driver of the pure rounds: says what nodes say, keeps what they are told."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from elasticjob.contract.messages import (
    Announce,
    EndRound,
    Facts,
    Failure,
    FailureClass,
    Finish,
    FromNode,
    Leaving,
    Membership,
    MemberState,
    PlanEnd,
    PodFact,
    PodState,
    Ready,
    Report,
    RoundPhase,
    Settings,
    StartRound,
    ToNode,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.report import build_report, round_phase
from elasticjob.rendezvous.state import Event, FactsArrived, NodeGone, NodeSaid, State, Tick, new_state

SETTINGS = Settings(min_nodes=2, max_nodes=4, target=4, max_restarts=3)


def boot(slot: int, incarnation: int = 0) -> str:
    return f"{slot}.{incarnation}"


class Job:
    """One coordinator's state, a clock, and the mailboxes of its nodes (by slot and incarnation)."""

    def __init__(self, settings: Settings = SETTINGS, *, store: int = 0, recovering: bool = False) -> None:
        self.now = 100.0
        self.state: State = new_state(settings, attempt=1, store=store, now=self.now, recovering=recovering)
        self.told: dict[str, list[ToNode]] = defaultdict(list)
        self.reasons: list[str] = []
        self.sequence = 0
        self.operator = False
        """Whether one is here, and says that this is the only store when it is asked."""
        self.decide(Tick())

    def decide(self, event: Event) -> None:
        decision = rounds.decide(self.state, event, self.now)
        self.state = decision.state
        self.reasons.append(decision.reason)
        for send in decision.effects:
            self.told[send.boot].append(send.message)
        if self.operator and self.report.asks and self.state.facts.only_store != self.report.asks:
            self.answer()

    def later(self, seconds: float) -> None:
        """Let the clock run, with every tick that falls due on the way."""
        end = self.now + seconds
        while (due := rounds.deadline(self.state, self.now)) is not None and due <= end:
            self.now = due
            self.decide(Tick())
        self.now = end
        self.decide(Tick())

    # ---- the operator
    def answer(self, asks: float | None = None) -> None:
        """Say "you are the only store" to the last question, or to another one."""
        self.sequence += 1
        facts = replace(self.state.facts, lease=1, sequence=self.sequence, only_store=asks or self.report.asks)
        self.decide(FactsArrived(facts))

    def facts(
        self,
        *pods: PodFact,
        charged: int = 0,
        charged_round: RoundId | None = None,
        finish: Finish | None = None,
        **settings: Any,
    ) -> None:
        self.sequence += 1
        self.operator = True
        rules = replace(self.state.settings, **settings)
        self.decide(FactsArrived(Facts(1, self.sequence, rules, charged, charged_round, pods, finish=finish)))

    # ---- nodes
    def announce(
        self, *slots: int, inc: int = 0, ready: bool = True, workers: int = 1, membership: Membership | None = None
    ) -> None:
        for slot in slots:
            message = Announce(
                slot, inc, boot(slot, inc), f"j-{slot}-{inc}", f"10.0.0.{slot}", 5000 + slot, workers,
                ready=ready, membership=membership,
            )  # fmt: skip
            self.decide(NodeSaid(boot(slot, inc), message))

    def say(self, slot: int, message: FromNode, inc: int = 0) -> None:
        self.decide(NodeSaid(boot(slot, inc), message))

    def started(self, *slots: int, inc: int = 0) -> None:
        for slot in slots:
            self.say(slot, WorkersStarted(self.start_of(slot, inc).round), inc)

    def running(self, *slots: int) -> None:
        """Announce these nodes and let the round start."""
        self.announce(*slots)
        if self.state.round is None:
            self.later(self.state.settings.last_call_timeout)
        self.started(*slots)

    def fail(self, slot: int, kind: FailureClass = FailureClass.USER_ERROR, inc: int = 0) -> None:
        start = self.start_of(slot, inc)
        failure = Failure(kind, f"j-{slot}-{inc}", self.now, rank=start.rank, exit_code=1, exception="ValueError")
        self.say(slot, WorkersFailed(start.round, failure), inc)

    def succeed(self, *slots: int) -> None:
        for slot in slots:
            self.say(slot, WorkersSucceeded(self.start_of(slot).round))

    def stopped(self, *slots: int, inc: int = 0) -> None:
        for slot in slots:
            self.say(slot, WorkersStopped(self.start_of(slot, inc).round, 6000 + slot), inc)

    def ready(self, slot: int, inc: int = 0) -> None:
        self.say(slot, Ready(), inc)

    def leave(self, slot: int) -> None:
        self.say(slot, Leaving("SIGTERM"))

    def gone(self, slot: int, inc: int = 0) -> None:
        self.decide(NodeGone(boot(slot, inc)))

    # ---- what is seen
    def start_of(self, slot: int, inc: int = 0) -> StartRound:
        return next(m for m in reversed(self.told[boot(slot, inc)]) if isinstance(m, StartRound))

    def last(self, slot: int, inc: int = 0) -> ToNode | None:
        messages = self.told[boot(slot, inc)]
        return messages[-1] if messages else None

    def told_to_end(self, *slots: int) -> bool:
        return all(isinstance(self.last(s), EndRound | PlanEnd) for s in slots)

    def finished(self, slot: int, inc: int = 0) -> Finish | None:
        last = self.last(slot, inc)
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


def pods(*slots: int, state: PodState = PodState.RUNNING, inc: int = 0) -> tuple[PodFact, ...]:
    return tuple(PodFact(s, inc, f"j-{s}-{inc}", state) for s in slots)


def member_of(start: StartRound, state: MemberState = MemberState.RUNNING) -> Membership:
    return Membership(start, state)


def job_of(*slots: int, target: int = 0, max_restarts: int = 3, **settings: Any) -> Job:
    """A job whose round of these slots runs, with an operator that knows their pods."""
    job = Job()
    job.facts(*pods(*slots), target=target or len(slots), max_restarts=max_restarts, **settings)
    job.running(*slots)
    return job

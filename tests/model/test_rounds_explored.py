"""Rounds around small models of agents and their links: random interleavings, checked at every step.

The model agent does what the real one must: it runs what it is told, stops what it is told to stop, reconnects, says
what it runs. Its workers step together, as collectives make them, and stand still where a planned end holds them.
Moves: workers start, step, fail, succeed, stop late; agents crash, blip, come back, leave; pods are replaced; the
target changes; the store is replaced; messages to a closed link are lost; the clock runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from elasticjob.contract.messages import (
    Announce,
    EndReason,
    EndRound,
    Facts,
    Failure,
    FailureClass,
    Finish,
    FromNode,
    Leaving,
    Membership,
    MemberState,
    Outcome,
    PlanEnd,
    PodFact,
    PodState,
    Ready,
    RoundPhase,
    Settings,
    Standby,
    StartRound,
    StepReport,
    ToNode,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds, view
from elasticjob.rendezvous.state import Event, FactsArrived, NodeGone, NodeSaid, State, Tick, new_state

MIN, MAX, BUDGET = 2, 4, 6
HOLD_TIMEOUT = 3.0
LIVE = (MemberState.STARTING, MemberState.RUNNING)


@dataclass
class Agent:
    """A node. `epoch` counts its connections: what was sent over an older one is lost."""

    slot: int
    incarnation: int
    ready: bool = False
    connected: bool = False
    leaving: bool = False
    start: StartRound | None = None
    state: MemberState = MemberState.STOPPED
    stopping: bool = False
    step: int = 0
    reports: bool = True
    """Whether its script calls `progress`."""
    held_until: float | None = None
    held_at: int | None = None
    last_step: int | None = None
    stopped_at: int | None = None
    """Where its workers stopped on plan."""
    ended: Outcome | None = None
    outbox: deque[FromNode] = field(default_factory=deque)
    inbox: deque[ToNode] = field(default_factory=deque)

    @property
    def boot(self) -> str:
        return f"{self.slot}.{self.incarnation}"

    @property
    def pod(self) -> str:
        return f"j-{self.slot}-{self.incarnation}"

    def connect(self) -> None:
        self.connected = True
        self.outbox.clear()
        self.inbox.clear()
        membership = Membership(self.start, self.state) if self.start else None
        self.outbox.append(
            Announce(self.slot, self.incarnation, self.boot, self.pod, "ip", 1, 1, "default", self.ready, membership)
        )
        if self.leaving:
            self.outbox.append(Leaving("SIGTERM"))

    def cut(self) -> None:
        self.connected = False
        self.outbox.clear()
        self.inbox.clear()

    def tell(self, message: FromNode) -> None:
        if self.connected:
            self.outbox.append(message)

    def hear(self, message: ToNode, now: float) -> None:
        match message:
            case StartRound() if self.start and message.round == self.start.round:
                pass  # said again after a reconnect
            case StartRound():
                assert self.start is None or message.round > self.start.round, "an old round came back"
                assert self.state is MemberState.STOPPED, f"{self.pod} still runs {self.start}"
                self.start, self.state = message, MemberState.STARTING
                self.step, self.held_until, self.last_step, self.stopped_at = 0, None, None, None
            case PlanEnd() if self.start and message.round == self.start.round and self.last_step is None:
                self.answer(now)
            case EndRound(last_step=int(step)) if self.start and message.round == self.start.round:
                if self.state is MemberState.RUNNING and self.last_step is None:
                    self.last_step, self.stopping = step, self.held_until is None or now >= self.held_until
            case EndRound() if self.start and message.round == self.start.round:
                self.stopping = True
            case Finish():
                self.ended, self.connected = message.outcome, False
                self.state = MemberState.STOPPED
            case PlanEnd() | EndRound() | Standby():
                pass

    def answer(self, now: float) -> None:
        """What the real agent says at once: the step at which its workers stand still at the latest."""
        assert self.start is not None
        able = self.reports and not self.stopping and self.state in (MemberState.RUNNING, MemberState.SUCCEEDED)
        self.held_until, step = (now + HOLD_TIMEOUT, self.step + 1) if able else (None, None)
        self.held_at = step
        if self.state is not MemberState.STOPPED:
            self.tell(StepReport(self.start.round, step))

    def may_step(self, now: float) -> bool:
        held = self.held_until is not None and now < self.held_until and self.step == self.held_at
        return self.state is MemberState.RUNNING and not held and self.step != self.last_step

    def stop(self) -> None:
        assert self.start is not None
        self.state, self.stopping = MemberState.STOPPED, False
        self.tell(WorkersStopped(self.start.round, 1))


class World:
    """Everything there is, and the moves that are possible."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.incarnation = 0
        self.sequence = 0
        self.charged = 0
        self.charged_round: RoundId | None = None
        self.target = 3
        self.agents: dict[int, Agent] = {}
        self.last_incarnation = dict.fromkeys(range(MAX), -1)
        self.declared: Outcome | None = None
        self.charges_seen: set[RoundId] = set()
        self.formed: set[RoundId] = set()
        self.kind_to_workers = False
        self.scripts_report = self.random.random() < 0.8
        self.stopped_on_plan = 0
        self.last_steps: dict[RoundId, int] = {}
        self.state: State = self._new_store(recovering=False)

    def _new_store(self, *, recovering: bool) -> State:
        settings = Settings(MIN, MAX, self.target, max_restarts=BUDGET)
        return new_state(settings, attempt=1, store=self.incarnation, now=self.now, recovering=recovering)

    # ---- moves
    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self.tick, self.reconcile]
        for agent in self.living():
            moves += self.moves_of(agent)
        if not self.kind_to_workers:
            moves += [self.rescale, self.replace_store]
        return moves

    def living(self) -> list[Agent]:
        return [a for a in self.agents.values() if a.ended is None]

    def moves_of(self, agent: Agent) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if not agent.connected:
            moves.append(agent.connect)
        if agent.outbox:
            moves += [lambda: self.deliver_from(agent)] * 3
        if agent.inbox:
            moves += [lambda: agent.hear(agent.inbox.popleft(), self.now)] * 3
        if not agent.ready:
            moves.append(lambda: self.warm(agent))
        if agent.may_step(self.now) and self.peers_allow(agent):
            moves += [lambda: self.step(agent)] * 3
        if agent.state is MemberState.RUNNING and agent.step == agent.last_step:
            moves += [lambda: self.stop_on_plan(agent)] * 3
        if agent.stopping or agent.state is MemberState.FAILED:
            moves.append(agent.stop)
        elif agent.state is MemberState.STARTING:
            moves.append(lambda: self.reach(agent, MemberState.RUNNING, WorkersStarted))
        elif agent.state is MemberState.RUNNING and (self.kind_to_workers or self.random.random() < 0.1):
            moves.append(lambda: self.reach(agent, MemberState.SUCCEEDED, WorkersSucceeded))
        if not self.kind_to_workers:
            if self.random.random() < 0.1:
                moves += [lambda: self.crash(agent), lambda: self.blip(agent), lambda: self.sigterm(agent)]
            if agent.state in LIVE and not agent.stopping and self.random.random() < 0.1:
                moves.append(lambda: self.fail(agent))
        return moves

    def peers_allow(self, agent: Agent) -> bool:
        """A step needs every rank of the round: nobody gets further ahead than one."""
        assert agent.start is not None
        peers = [a for a in self.agents.values() if a.start is not None and a.start.round == agent.start.round]
        ahead = (p.step > agent.step or (p.state is MemberState.RUNNING and p.step == agent.step) for p in peers)
        return all(ahead)

    def step(self, agent: Agent) -> None:
        agent.step += 1

    def stop_on_plan(self, agent: Agent) -> None:
        assert agent.start is not None
        agent.stopped_at = agent.step
        peers = [a for a in self.agents.values() if a.start is not None and a.start.round == agent.start.round]
        assert {p.stopped_at for p in peers} <= {agent.step, None}, "workers stopped at different steps"
        self.stopped_on_plan += 1
        agent.stop()

    def tick(self) -> None:
        due = rounds.deadline(self.state, self.now)
        self.now = due if due is not None and self.random.random() < 0.7 else self.now + self.random.random()
        self.decide(Tick())

    def reconcile(self) -> None:
        """The operator: takes the report in, replaces pods that are gone, says what it knows."""
        if self.declared is None:
            for slot in range(MAX):
                agent = self.agents.get(slot)
                wanted = slot < self.target
                if wanted and (agent is None or agent.ended is not None):
                    self.last_incarnation[slot] += 1
                    self.agents[slot] = Agent(slot, self.last_incarnation[slot], reports=self.scripts_report)
        for ended in view.report(self.state, self.now).ended:
            if self.charged_round is None or ended.round > self.charged_round:
                self.charged += ended.charged
                self.charged_round = ended.round
        pods = tuple(
            PodFact(a.slot, a.incarnation, a.pod, PodState.DRAINING if a.leaving else PodState.RUNNING)
            for a in self.living()
        )
        self.sequence += 1
        settings = Settings(MIN, MAX, self.target, max_restarts=BUDGET)
        facts = Facts(1, self.sequence, settings, self.charged, self.charged_round, pods)
        asks = view.report(self.state, self.now).asks
        self.decide(FactsArrived(replace(facts, only_store=asks)))
        for agent in self.living():
            if agent.slot >= self.target:
                self.sigterm(agent)

    def rescale(self) -> None:
        self.target = self.random.randint(MIN, MAX)

    def replace_store(self) -> None:
        if self.declared is not None or self.random.random() < 0.9:
            return
        self.incarnation += 1
        self.state = self._new_store(recovering=True)
        for agent in self.living():
            agent.cut()

    def deliver_from(self, agent: Agent) -> None:
        self.decide(NodeSaid(agent.boot, agent.outbox.popleft()))

    def warm(self, agent: Agent) -> None:
        agent.ready = True
        agent.tell(Ready())

    def reach(self, agent: Agent, state: MemberState, message: type[WorkersStarted | WorkersSucceeded]) -> None:
        assert agent.start is not None
        agent.state = state
        agent.tell(message(agent.start.round))

    def fail(self, agent: Agent) -> None:
        assert agent.start is not None
        kind = self.random.choice([FailureClass.KILLED, FailureClass.COLLECTIVE_FAILED])
        agent.tell(WorkersFailed(agent.start.round, Failure(kind, agent.pod, self.now, rank=agent.start.rank)))
        agent.state = MemberState.FAILED

    def crash(self, agent: Agent) -> None:
        agent.cut()
        agent.ended, agent.state = Outcome.ERROR, MemberState.STOPPED
        self.decide(NodeGone(agent.boot))

    def blip(self, agent: Agent) -> None:
        if agent.connected:
            agent.cut()
            self.decide(NodeGone(agent.boot))

    def sigterm(self, agent: Agent) -> None:
        if not agent.leaving:
            agent.leaving = True
            agent.tell(Leaving("SIGTERM"))

    def decide(self, event: Event) -> None:
        decision = rounds.decide(self.state, event, self.now)
        self.state = decision.state
        for send in decision.effects:
            self.check_last_step(send.message)
            for agent in self.agents.values():
                if agent.boot == send.boot and agent.connected:
                    agent.inbox.append(send.message)
        self.check()

    # ---- oracles
    def check_last_step(self, message: ToNode) -> None:
        """One last step for all of a round, which every worker can still reach and none is past."""
        if not isinstance(message, EndRound) or message.last_step is None:
            return
        assert self.last_steps.setdefault(message.round, message.last_step) == message.last_step, "two last steps"
        for agent in self.living():
            node = self.state.nodes.get(agent.boot)
            here = agent.start is not None and agent.start.round == message.round and node is not None
            held = agent.held_until is not None and self.now < agent.held_until
            if here and held and agent.last_step is None:
                assert agent.step <= message.last_step, f"{agent.pod} is past the last step"

    def check(self) -> None:
        state = self.state
        if state.round is not None:
            assert MIN <= len(state.round.members) <= MAX or state.round.id.store < state.store
            slots = [m.pod for m in state.round.members.values()]
            assert len(set(slots)) == len(slots), "a node is in a round twice"
        if self.declared is not None:
            assert state.outcome is self.declared, "an outcome was undone"
        if state.outcome is not None:
            self.declared = state.outcome
        assert state.charged <= BUDGET, "more restarts than the budget has"
        self.check_worlds()

    def check_worlds(self) -> None:
        """Never two running worlds: when a round forms, nobody known to be alive still runs an older one."""
        current = self.state.round
        if current is None or current.id in self.formed:
            return
        self.formed.add(current.id)
        for agent in self.living():
            node = self.state.nodes.get(agent.boot)
            alive = node is not None and node.gone_at is None and node.stale is None and agent.connected
            busy = agent.start is not None and agent.start.round < current.id and agent.state is not MemberState.STOPPED
            announced = not any(isinstance(m, Announce) for m in agent.outbox)
            assert not (alive and busy and announced), f"{agent.pod} runs {agent.start} beside {current.id}"


def test_the_exploration_gets_everywhere() -> None:
    """What random walks never reach they cannot check."""
    reached: set[str] = set()
    for seed in range(200):
        world = World(seed)
        for step in range(500):
            world.kind_to_workers = step > 250
            world.random.choice(world.moves())()
            report = view.report(world.state, world.now)
            reached |= {report.phase.value, *(e.reason.value for e in report.ended)}
            if world.state.round and world.state.round.ending:
                reached.add(world.state.round.ending.reason.value)
            reached |= {"stopped on plan"} if world.stopped_on_plan else set()
            reached |= {"restored"} if world.state.round and world.state.round.id.store < world.incarnation else set()
    assert reached >= {p.value for p in RoundPhase} | {e.value for e in EndReason} | {"restored", "stopped on plan"}


def run(world: World, steps: int) -> None:
    for _ in range(steps):
        world.random.choice(world.moves())()


@pytest.mark.parametrize("seed", range(150))
def test_nothing_goes_wrong_and_the_job_ends_once_faults_stop(seed: int) -> None:
    world = World(seed)
    run(world, 250)
    world.kind_to_workers = True
    for _ in range(4000):
        if world.declared is not None:
            break
        world.random.choice(world.moves())()
    assert world.declared is not None, f"stuck: {view.report(world.state, world.now)}"

"""Small models of agents, links, an operator and up to two stores around the real rules: a world to explore.

Everything is frozen data: `moves(world)` names what may happen next, `step(world, move)` is the world afterwards, and
the same move does the same always. What must hold is in `rounds_invariants`.

The model agent does what the real one must: it runs what it is told, stops what it is told to stop, reconnects, says
what it runs, freezes when it is cut off, and tells an older store of a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    Outcome,
    PlanEnd,
    PodState,
    Ready,
    Report,
    RoundSettings,
    StartRound,
    StepReport,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.report import build_report
from elasticjob.rendezvous.state import (
    CoordinatorEvent,
    CoordinatorState,
    NewerStoreSeen,
    NodeDisconnected,
    NodeMessage,
    OperatorViewReceived,
    Tick,
    initial_state,
)
from elasticjob_operator.plan import stores

MIN, BUDGET = 2, 6
Move = tuple[str, int]
"""What, and the index or store that it happens to."""

AGENT_FAULTS = ("crash", "blip", "fail", "sigterm", "cut", "pause", "late", "succeed")
FAULTS = (*AGENT_FAULTS, "restart-store", "second-store", "target", "operator-away")


@dataclass(frozen=True)
class Agent:
    index: int
    incarnation: int
    ready: bool = False
    store: int | None = None
    """The store it is connected to."""
    newest: int = 0
    leaving: bool = False
    start: StartRound | None = None
    state: MemberState = MemberState.STOPPED
    stopping: bool = False
    ended: Outcome | None = None
    cut: bool = False
    frozen: bool = False
    paused: bool = False
    outbox: tuple[NodeToCoordinator, ...] = ()
    inbox: tuple[CoordinatorToNode, ...] = ()
    past: NodeToCoordinator | None = None
    """The last word on a round before the present one."""

    @property
    def agent_id(self) -> str:
        return f"{self.index}.{self.incarnation}"

    @property
    def pod(self) -> str:
        return f"j-{self.index}-{self.incarnation}"

    @property
    def busy(self) -> bool:
        return self.ended is None and self.state is not MemberState.STOPPED


@dataclass(frozen=True)
class Store:
    incarnation: int
    state: CoordinatorState


@dataclass(frozen=True)
class World:
    size: int
    """Slots, with those of spares."""
    stores: tuple[Store, ...]
    agents: tuple[Agent, ...]
    now: float = 0.0
    target: int = 3
    away: bool = False
    sequence: int = 0
    charged: int = 0
    charged_round: RoundId | None = None
    counted: tuple[RoundId, ...] = ()
    """Rounds that were charged, in the order in which the operator took them in."""
    declared: Outcome | None = None
    spares: int = 0
    before: Report | None = None
    """What the operator last heard of the store before the newest."""
    coming: frozenset[str] = frozenset()
    """Boot ids of those who were not with the newest store when the older one died: what it knows is not all."""
    on_lost_node: int = -1
    """The index whose pod was lost with the store, as the operator sees it."""

    def agent(self, index: int) -> Agent:
        return next(a for a in self.agents if a.index == index)


def settings(world: World) -> RoundSettings:
    return RoundSettings(MIN, world.size - world.spares, world.target, spares=world.spares, max_restarts=BUDGET)


def begin(size: int = 3, spares: int = 0) -> World:
    world = World(size, (), (), target=size - spares, spares=spares)
    first = Store(0, initial_state(settings(world), attempt=1, store=0, now=0.0))
    return replace(world, stores=(first,), agents=tuple(Agent(index, 0) for index in range(size)))


def running(size: int = 3, spares: int = 0) -> World:
    """All nodes (but for spares) train in their second round, the operator knows it."""
    world = _settled(begin(size, spares))
    return _settled(step(world, ("fail", size - spares - 1)))


def finishing(size: int = 3) -> World:
    """Everybody's workers are done, the store has declared success, and one node has been told."""
    world = running(size)
    for index in range(size):
        world = step(step(world, ("succeed", index)), ("up", index))
    return step(world, ("down", 0))


def parted(size: int, there: tuple[int, ...], *, by_word: bool) -> World:
    """The operator has given a store up that lives on, and `there` are with its successor. `by_word`: the others were
    told to go on without them before, and do."""
    world = running(size)
    for index in there:
        world = step(world, ("cut", index))
    world = _settled(step(world, ("tick", 0)), but=("tick", "heal")) if by_word else world
    world = step(world, ("second-store", -1))
    for index in there:
        world = step(step(world, ("heal", index)), ("connect", index))
    return world


def _settled(world: World, but: tuple[str, ...] = ("tick",)) -> World:
    """Nothing more to say or to do, but for what the clock brings."""
    while moves := [m for m in calm(world) if m[0] not in but]:
        world = step(world, moves[0])
    return world


# ---- what may happen


def calm(world: World) -> Iterator[Move]:
    """Everything that is no fault: messages, work, clocks, the operator, and the end of what has befallen the world."""
    for a in world.agents:
        yield from ((move, a.index) for move in _agent_moves(world, a))
    if world.away:
        yield "operator-back", 0
    elif _news(world):
        yield "reconcile", 0
    if len(world.stores) > 1:
        yield "old-store-dies", 0
    if any(rounds.next_deadline(s.state, world.now) is not None for s in world.stores):
        yield "tick", 0


def _agent_moves(world: World, a: Agent) -> Iterator[str]:
    if a.ended is not None:
        return
    if a.paused:
        yield "resume"
        return
    if a.cut:
        yield "heal"
    elif a.store is None:
        yield from ("connect", "connect-old")[: len(world.stores)]
    if a.outbox:
        yield "up"
    if a.inbox:
        yield "down"
    if not a.ready:
        yield "warm"
    if a.stopping or a.state is MemberState.FAILED or (a.state is MemberState.STARTING and not a.frozen):
        yield "work"


def faults(world: World, kinds: tuple[str, ...] = FAULTS) -> Iterator[Move]:
    for a in world.agents:
        yield from ((move, a.index) for move in kinds if move in AGENT_FAULTS and _may(world, a, move))
    if "restart-store" in kinds:
        yield "restart-store", 0
    if "second-store" in kinds and len(world.stores) == 1:
        yield from (("second-store", index) for index in (-1, world.size - 1))
    if "target" in kinds:
        yield "target", MIN if world.target > MIN else world.size - world.spares
    if "operator-away" in kinds and not world.away:
        yield "operator-away", 0


def _may(world: World, a: Agent, move: str) -> bool:
    if a.ended is not None or a.paused:
        return False
    match move:
        case "blip" | "cut":
            return a.store is not None
        case "sigterm":
            return not a.leaving
        case "fail":
            return a.state in (MemberState.STARTING, MemberState.RUNNING) and not (a.stopping or a.frozen)
        case "succeed":
            return a.state is MemberState.RUNNING and not (a.stopping or a.frozen)
        case "late":
            return a.past is not None and a.store is not None
        case _:
            return True


# ---- what it does


def step(world: World, move: Move) -> World:
    name, index = move
    match name:
        case "tick":
            due = [d for s in world.stores if (d := rounds.next_deadline(s.state, world.now)) is not None]
            world = replace(world, now=min(due))
            for store in world.stores:
                world = _decide(world, store.incarnation, Tick())
            return world
        case "reconcile":
            return _reconcile(world)
        case "operator-away" | "operator-back":
            return replace(world, away=name == "operator-away")
        case "target":
            return replace(world, target=index)
        case "restart-store":
            last = world.stores[-1]
            return _with_store(_hang_up(world, last.incarnation), world.stores[:-1], last)
        case "second-store":
            return _with_store(_given_up(world, index), world.stores, world.stores[-1])
        case "old-store-dies":
            newest = world.stores[-1].incarnation
            coming = frozenset(a.agent_id for a in world.agents if a.store != newest)
            return replace(_hang_up(world, world.stores[0].incarnation), stores=world.stores[1:], coming=coming)
        case _:
            return _agent_step(world, world.agent(index), name)


def _with_store(world: World, kept: tuple[Store, ...], last: Store) -> World:
    """A successor; in the model every start of a store has an incarnation of its own."""
    state = initial_state(settings(world), attempt=1, store=last.incarnation + 1, now=world.now, recovering=True)
    return replace(world, stores=(*kept, Store(last.incarnation + 1, state)))


def _given_up(world: World, index: int) -> World:
    """The operator hears nothing more of the newest store, whatever that still does (`links`, `plan.stores`)."""
    return replace(world, before=build_report(world.stores[-1].state, world.now), on_lost_node=index)


def _hang_up(world: World, incarnation: int) -> World:
    gone = (replace(a, store=None, outbox=(), inbox=()) if a.store == incarnation else a for a in world.agents)
    return replace(world, agents=tuple(gone))


def _agent_step(world: World, a: Agent, name: str) -> World:
    match name:
        case "connect" | "connect-old":
            return _connect(world, a, world.stores[-1 if name == "connect" else 0])
        case "up":
            assert a.store is not None
            world = _put(world, replace(a, outbox=a.outbox[1:]))
            return _decide(world, a.store, NodeMessage(a.agent_id, a.outbox[0]))
        case "down":
            return _put(world, hear(replace(a, inbox=a.inbox[1:]), a.inbox[0]))
        case "warm":
            return _put(world, tell(replace(a, ready=True), Ready()))
        case "work":
            return _put(world, _work(a))
        case "succeed":
            assert a.start is not None
            return _put(world, tell(replace(a, state=MemberState.SUCCEEDED), WorkersSucceeded(a.start.round)))
        case "fail":
            assert a.start is not None
            failure = Failure(FailureClass.KILLED, a.pod, world.now, rank=a.start.rank)
            return _put(world, tell(replace(a, state=MemberState.FAILED), WorkersFailed(a.start.round, failure)))
        case "sigterm":
            return _put(world, tell(replace(a, leaving=True), Leaving("SIGTERM")))
        case "late":
            assert a.store is not None
            assert a.past is not None
            return _decide(world, a.store, NodeMessage(a.agent_id, a.past))
        case "pause" | "resume":
            return _put(world, replace(a, paused=name == "pause"))
        case "heal":
            return _put(world, replace(a, cut=False))
        case _:
            return _cut(world, a, name)


def _cut(world: World, a: Agent, name: str) -> World:
    """crash, blip, cut: the store notices that the link is gone."""
    store, a = a.store, replace(a, store=None, outbox=(), inbox=())
    if name == "crash":
        a = replace(a, ended=Outcome.ERROR, state=MemberState.STOPPED)
    if name == "cut":
        a = replace(a, cut=True, frozen=a.busy)
    world = _put(world, a)
    return world if store is None else _decide(world, store, NodeDisconnected(a.agent_id))


def _connect(world: World, a: Agent, store: Store) -> World:
    if store.state.newer_store is not None:
        return world  # it does not listen any more
    if store.incarnation < a.newest:
        return _decide(world, store.incarnation, NewerStoreSeen(a.newest))
    membership = LastMembership(a.start, a.state) if a.start else None
    said: list[NodeToCoordinator] = [
        Announce(a.index, a.incarnation, a.agent_id, a.pod, "ip", 1, 1, "default", a.ready, membership)
    ]
    if a.start and a.state is MemberState.STOPPED:
        said.append(WorkersStopped(a.start.round, 1))
    if a.leaving:
        said.append(Leaving("SIGTERM"))
    return _put(world, replace(a, store=store.incarnation, newest=store.incarnation, outbox=tuple(said), inbox=()))


def tell(a: Agent, message: NodeToCoordinator) -> Agent:
    return a if a.store is None else replace(a, outbox=(*a.outbox, message))


def hear(a: Agent, message: CoordinatorToNode) -> Agent:
    match message:
        case StartRound() if a.start is not None and message.round <= a.start.round:
            return replace(a, frozen=a.frozen and message.round != a.start.round)  # said again after a reconnect
        case StartRound():
            assert a.state is MemberState.STOPPED, f"{a.pod} still runs {a.start} and is told {message.round}"
            past = WorkersStopped(a.start.round, 1) if a.start else None
            return replace(a, start=message, state=MemberState.STARTING, past=past, frozen=False)
        case EndRound() if a.start and message.round == a.start.round and a.state is not MemberState.STOPPED:
            return replace(a, stopping=True)
        case EndRound() if a.state is MemberState.STOPPED:
            return tell(a, WorkersStopped(message.round, 1))
        case PlanEnd():
            return tell(a, StepReport(message.round, None))
        case Finish():
            return replace(a, ended=message.outcome, state=MemberState.STOPPED, store=None, outbox=(), inbox=())
        case _:
            return a


def _work(a: Agent) -> Agent:
    """Workers that were told to stop have stopped; those that start run; what failed ends its siblings."""
    assert a.start is not None
    if a.state is MemberState.STARTING and not a.stopping:
        return tell(replace(a, state=MemberState.RUNNING), WorkersStarted(a.start.round))
    a = replace(a, state=MemberState.STOPPED, stopping=False, frozen=False)
    return tell(a, WorkersStopped(a.start.round, 1)) if a.start else a


def _put(world: World, agent: Agent) -> World:
    return replace(world, agents=tuple(agent if a.index == agent.index else a for a in world.agents))


def _decide(world: World, incarnation: int, event: CoordinatorEvent) -> World:
    store = next(s for s in world.stores if s.incarnation == incarnation)
    decision = rounds.decide(store.state, event, world.now)
    stores = tuple(Store(incarnation, decision.state) if s is store else s for s in world.stores)
    told = {a.agent_id: a for a in world.agents if a.store == incarnation}
    for send in decision.effects:
        if (a := told.get(send.agent_id)) is not None:
            told[send.agent_id] = replace(a, inbox=(*a.inbox, send.message))
    world = replace(world, stores=stores, agents=tuple(told.get(a.agent_id, a) for a in world.agents))
    if world.declared is None and decision.state.outcome is not None:
        world = replace(world, declared=decision.state.outcome)
    return _hang_up(world, incarnation) if decision.state.newer_store is not None else world


# ---- the operator


def _facts(world: World) -> OperatorView:
    """For the newest store: the one that status names."""
    pods = tuple(
        ExpectedPod(a.index, a.incarnation, a.pod, _pod_state(world, a)) for a in world.agents if a.ended is None
    )
    report = build_report(world.stores[-1].state, world.now)
    facts = OperatorView(1, world.sequence, settings(world), world.charged, world.charged_round, pods)
    return replace(facts, confirmed_request=stores.confirmable_request(report, world.before, older=_older(world)))


def _older(world: World) -> bool:
    """An older store lives, or a node that trains is still on its way from one. (The operator gives them time.)"""
    coming = (a for a in world.agents if a.agent_id in world.coming and a.busy and not a.cut)
    return len(world.stores) > 1 or any(a.store is None or _announces(a) for a in coming)


def _announces(a: Agent) -> bool:
    return any(isinstance(message, Announce) for message in a.outbox)


def _pod_state(world: World, a: Agent) -> PodState:
    if a.leaving:
        return PodState.DRAINING
    return PodState.LOST if (a.index, a.incarnation) == (world.on_lost_node, 0) else PodState.RUNNING


def proof(world: World) -> Outcome | None:
    """How the job has ended, by the termination message of a pod."""
    said = {a.ended for a in world.agents}
    return next((o for o in (Outcome.SUCCEEDED, Outcome.FAILED) if o in said), None)


def _news(world: World) -> bool:
    newest = world.stores[-1].state
    if newest.outcome is not None or proof(world) is not None:
        return newest.outcome is None
    known = newest.operator_view
    unsaid = _facts(world) != replace(known, lease=1, sequence=world.sequence)
    indices = world.target + world.spares
    missing = any(a.ended is not None and a.index < indices for a in world.agents)
    surplus = any(a.ended is None and not a.leaving and a.index >= indices for a in world.agents)
    return unsaid or missing or surplus or bool(_uncounted(world))


def _uncounted(world: World) -> list[tuple[RoundId, bool]]:
    ended = build_report(world.stores[-1].state, world.now).ended_rounds
    seen = world.charged_round
    return [(e.round, e.charged) for e in ended if seen is None or e.round > seen]


def _reconcile(world: World) -> World:
    """Tells a store of an end that it does not know of. Else takes the report in, replaces pods that have ended, says
    what it knows, ends pods beyond the target."""
    if (outcome := proof(world)) is not None:
        world = replace(world, sequence=world.sequence + 1)
        end = replace(_facts(world), pods=(), finish=Finish(outcome, "by a termination message"))
        return _decide(world, world.stores[-1].incarnation, OperatorViewReceived(end))
    for round_id, charged in _uncounted(world):
        counted = (*world.counted, round_id) if charged else world.counted
        world = replace(world, charged=world.charged + charged, charged_round=round_id, counted=counted)
    for a in world.agents:
        if a.ended is not None and a.index < world.target + world.spares:
            world = _put(world, Agent(a.index, a.incarnation + 1))
    world = replace(world, sequence=world.sequence + 1)
    world = _decide(world, world.stores[-1].incarnation, OperatorViewReceived(_facts(world)))
    for a in world.agents:
        if a.ended is None and not a.leaving and a.index >= world.target + world.spares:
            world = _put(world, tell(replace(a, leaving=True), Leaving("SIGTERM")))
    return world

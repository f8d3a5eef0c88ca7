"""Small models of agents, links, an operator and up to two stores around the real rules: a world to explore.

Everything is frozen data. `calm(world)` and `faults(world)` yield the moves that are possible next; `step(world, move)`
returns the world after a move and is deterministic. The invariants are in `rounds_invariants`.

The model agent does what the real one must do: it starts and stops workers as the coordinator sends it to, reconnects,
announces its round, freezes its workers when it is cut off, and reports a newer store to an older one.
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
    StandbyStore,
    StartRound,
    StepReport,
    StoreActive,
    StoreToNode,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous import rounds
from elasticjob.rendezvous.decision import RoundDecision
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
"""The name of the move, and the index or target that it applies to."""

AGENT_FAULTS = ("crash", "blip", "fail", "sigterm", "cut", "pause", "late", "succeed")
STANDBY_AGENT_FAULTS = (*AGENT_FAULTS, "cut-store")
FAULTS = (*AGENT_FAULTS, "restart-store", "second-store", "target", "operator-down")
STANDBY_FAULTS = (
    *STANDBY_AGENT_FAULTS, "kill-store", "restart-in-place", "promote", "second-store", "kill-standby",
    "restart-standby", "delay-view", "target", "operator-down",
)  # fmt: skip
"""Faults in a world with a standby store."""


@dataclass(frozen=True)
class Agent:
    index: int
    incarnation: int
    ready: bool = False
    store: int | None = None
    """The store it is connected to."""
    newest: int = 0
    """The highest incarnation of a store that it has connected to."""
    standby: int = -1
    """The incarnation of the standby store that it knows."""
    passive: bool = False
    """Whether the store it is connected to is a passive standby store."""
    cut_store: int = -1
    """The incarnation of a store that it cannot reach, though it reaches all others; -1 for none."""
    leaving: bool = False
    start: StartRound | None = None
    """The last assignment that it received."""
    state: MemberState = MemberState.STOPPED
    stopping: bool = False
    ended: Outcome | None = None
    cut: bool = False
    frozen: bool = False
    paused: bool = False
    outbox: tuple[NodeToCoordinator, ...] = ()
    inbox: tuple[CoordinatorToNode | StoreToNode, ...] = ()
    past: NodeToCoordinator | None = None
    """The last message about the round before the present one, for the move `late`."""

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
    """Indices, including those of spares."""
    stores: tuple[Store, ...]
    agents: tuple[Agent, ...]
    now: float = 1.0
    target: int = 3
    operator_down: bool = False
    sequence: int = 0
    charged: int = 0
    charged_round: RoundId | None = None
    counted: tuple[RoundId, ...] = ()
    """Rounds that the operator has charged, in order."""
    declared: Outcome | None = None
    spares: int = 0
    before: Report | None = None
    """The last report of the older store to the operator."""
    in_transit: frozenset[str] = frozenset()
    """Agent ids that were not connected to the newest store when the older one ended: it may not know their rounds."""
    on_lost_node: int = -1
    """The index whose first pod is on the lost node of the store, as the operator sees it; -1 for none."""
    with_standby: bool = False
    """Whether the operator keeps a standby store."""
    named: int = 0
    """Incarnation of the store that status names."""
    standby: int = -1
    """Incarnation of the standby store that status names; -1 for none."""
    newest: int = 0
    """The highest incarnation of a store so far."""
    late_view: tuple[int, OperatorView] | None = None
    """A view on its way to the store of this incarnation, later than those that follow it."""

    def agent(self, index: int) -> Agent:
        return next(a for a in self.agents if a.index == index)

    def store(self, incarnation: int) -> Store | None:
        return next((s for s in self.stores if s.incarnation == incarnation), None)

    @property
    def current(self) -> Store | None:
        """The store that status names; None if it is dead or closed."""
        store = self.store(self.named)
        return store if store is not None and store.state.newer_store is None else None


def settings(world: World) -> RoundSettings:
    return RoundSettings(MIN, world.size - world.spares, world.target, spares=world.spares, max_restarts=BUDGET)


def begin(size: int = 3, spares: int = 0) -> World:
    world = World(size, (), (), target=size - spares, spares=spares)
    first = Store(0, initial_state(settings(world), attempt=1, store=0, now=world.now))
    return replace(world, stores=(first,), agents=tuple(Agent(index, 0) for index in range(size)))


def running(size: int = 3, spares: int = 0) -> World:
    """All nodes but the spares train in their second round, and the operator knows it."""
    world = settle(begin(size, spares))
    return settle(step(world, ("fail", size - spares - 1)))


def with_standby(size: int = 3, spares: int = 0) -> World:
    """All nodes but the spares train, and a standby store exists that they know."""
    return settle(replace(running(size, spares), with_standby=True))


def finishing(size: int = 3) -> World:
    """All workers have succeeded, the store has declared success, and one node has received it."""
    world = running(size)
    for index in range(size):
        world = step(step(world, ("succeed", index)), ("up", index))
    return step(world, ("down", 0))


def continued_without(size: int, lost: tuple[int, ...]) -> World:
    """The operator has confirmed the store, which goes on without the nodes `lost`. A new standby store exists."""
    world = with_standby(size)
    for index in lost:
        world = step(world, ("cut", index))
    world = settle(step(world, ("tick", 0)), but=("tick", "heal"))
    for index in lost:
        world = step(world, ("heal", index))
    return world


def moved_to_standby(size: int, moved: tuple[int, ...]) -> World:
    """The nodes `moved` cannot reach the store, and wait at the standby store."""
    world = with_standby(size)
    for index in moved:
        world = step(step(step(world, ("cut-store", index)), ("connect-standby", index)), ("up", index))
    return world


def two_stores(size: int, moved: tuple[int, ...], *, confirmed: bool) -> World:
    """The operator has replaced a store that is still alive, and the nodes `moved` are connected to its successor.

    `confirmed`: before that, the operator confirmed the older store, and the other nodes started a round by themselves.
    """
    world = running(size)
    for index in moved:
        world = step(world, ("cut", index))
    world = settle(step(world, ("tick", 0)), but=("tick", "heal")) if confirmed else world
    world = step(world, ("second-store", -1))
    for index in moved:
        world = step(step(world, ("heal", index)), ("connect", index))
    return world


def settle(world: World, but: tuple[str, ...] = ("tick",)) -> World:
    """Take all calm moves until none is left but those in `but`."""
    while moves := [m for m in calm(world) if m[0] not in but]:
        world = step(world, moves[0])
    return world


# ---- possible moves


def calm(world: World) -> Iterator[Move]:
    """Yield all moves that are no fault: messages, work, the clock, the operator, and the ends of faults."""
    for a in world.agents:
        yield from ((move, a.index) for move in _agent_moves(world, a))
    if world.operator_down:
        yield "operator-up", 0
    elif _has_news(world):
        yield "reconcile", 0
    if world.stores and world.stores[0].incarnation < world.named:
        yield "old-store-ends", 0
    if world.late_view is not None:
        yield "view-arrives", 0
    if _unwanted(world):
        yield "retired-store-ends", 0
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
    else:
        yield from _connections(world, a)
    if a.outbox:
        yield "up"
    if a.inbox:
        yield "down"
    if not a.ready:
        yield "warm"
    if a.stopping or a.state is MemberState.FAILED or (a.state is MemberState.STARTING and not a.frozen):
        yield "work"


def _connections(world: World, a: Agent) -> Iterator[str]:
    """Yield the stores that a node tries: all without a link, and the active ones while it waits at a passive one.

    It finds the store that status names, an older one that still runs, and the standby store that it knows.
    """
    if a.cut_store >= 0:
        yield "heal"
    if a.store is not None and not a.passive:
        return
    stores = {"connect": world.named, "connect-old": world.stores[0].incarnation if world.stores else -1}
    if a.store is None:
        stores["connect-standby"] = a.standby
    for move, incarnation in stores.items():
        store = world.store(incarnation)
        passive = move == "connect-old" and store is not None and store.state.passive
        if store is not None and incarnation not in (a.cut_store, a.store) and not passive:
            yield move


def faults(world: World, kinds: tuple[str, ...] = FAULTS) -> Iterator[Move]:
    """Yield the possible faults of these kinds."""
    for a in world.agents:
        yield from ((move, a.index) for move in kinds if move in STANDBY_AGENT_FAULTS and _possible(a, move))
    if "restart-store" in kinds:
        yield "restart-store", 0
    yield from ((move, 0) for move in kinds if _store_fault_possible(world, move))
    if "second-store" in kinds and world.current is not None and sum(not s.state.passive for s in world.stores) == 1:
        yield from (("second-store", index) for index in (-1, world.size - 1))
    if "target" in kinds:
        yield "target", MIN if world.target > MIN else world.size - world.spares
    if "operator-down" in kinds and not world.operator_down:
        yield "operator-down", 0


def _store_fault_possible(world: World, move: str) -> bool:
    standby = world.store(world.standby)
    match move:
        case "kill-store" | "restart-in-place":
            return world.current is not None
        case "promote":
            return world.current is not None and standby is not None
        case "kill-standby" | "restart-standby":
            return standby is not None
        case "delay-view":
            return world.current is not None and world.late_view is None and not world.operator_down
        case _:
            return False


def _possible(a: Agent, move: str) -> bool:
    if a.ended is not None or a.paused:
        return False
    match move:
        case "blip" | "cut":
            return a.store is not None
        case "cut-store":
            return a.store is not None and not a.passive and a.cut_store < 0
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


# ---- effects of moves


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
        case "operator-down" | "operator-up":
            return replace(world, operator_down=name == "operator-down")
        case "target":
            return replace(world, target=index)
        case "restart-store":
            last = world.stores[-1]
            return _with_successor(_close_links(world, last.incarnation), world.stores[:-1])
        case "second-store":
            return _with_successor(_replace_store(world, index), world.stores)
        case "old-store-ends":
            return _end_store(world, world.stores[0])
        case "retired-store-ends":
            unwanted = _unwanted(world)[0]
            if not unwanted.state.retired:
                return _end_store(world, unwanted)
            world = _close_links(world, unwanted.incarnation)
            return replace(world, stores=tuple(s for s in world.stores if s is not unwanted))
        case "delay-view":
            current, world = world.current, replace(world, sequence=world.sequence + 1)
            assert current is not None
            return replace(world, late_view=(world.named, _operator_view(world, current, world)))
        case "view-arrives":
            assert world.late_view is not None
            number, view = world.late_view
            world = replace(world, late_view=None)
            return _decide(world, number, OperatorViewReceived(view)) if world.store(number) else world
        case "kill-store" | "restart-in-place" | "promote":
            return _current_store_fault(world, name)
        case "kill-standby" | "restart-standby":
            return _standby_store_fault(world, name)
        case _:
            return _agent_step(world, world.agent(index), name)


def _with_successor(world: World, kept: tuple[Store, ...]) -> World:
    """Start a successor, which status names. In the model every start of a store has an incarnation of its own."""
    number = world.newest + 1
    state = initial_state(settings(world), attempt=1, store=number, now=world.now, recovering=True)
    return replace(world, stores=(*kept, Store(number, state)), named=number, newest=number, standby=-1)


def _replace_store(world: World, index: int) -> World:
    """The operator ends its link to the newest store and replaces it (`plan.stores`); the store may go on."""
    assert world.current is not None
    return replace(world, before=build_report(world.current.state, world.now), on_lost_node=index)


def _unwanted(world: World) -> list[Store]:
    """Return the passive stores that status does not name any more, so that the operator has deleted their pods."""
    return [s for s in world.stores if s.state.passive and world.named < s.incarnation != world.standby]


def _end_store(world: World, store: Store) -> World:
    """A store that may have been active ends: its nodes are on their way to others."""
    in_transit = frozenset(a.agent_id for a in world.agents if a.store != world.named)
    world = _close_links(world, store.incarnation)
    return replace(world, stores=tuple(s for s in world.stores if s is not store), in_transit=in_transit)


def _current_store_fault(world: World, name: str) -> World:
    """The store that status names ends, restarts in place, or is alive and replaced by the standby store."""
    store = world.current
    assert store is not None
    if name == "restart-in-place":
        number = store.state.round_number + 1000
        state = initial_state(
            settings(world), attempt=1, store=store.incarnation, now=world.now, recovering=True, round_number=number
        )
        world = _close_links(world, store.incarnation)
        return _put_store(world, Store(store.incarnation, state))
    world = _replace_store(world, -1)
    if name == "promote":
        return replace(world, named=world.standby, standby=-1)
    world = _close_links(world, store.incarnation)
    return replace(world, stores=tuple(s for s in world.stores if s is not store))


def _standby_store_fault(world: World, name: str) -> World:
    """The standby store ends, or restarts in place: if it was active, it is passive again."""
    store = world.store(world.standby)
    assert store is not None
    if name == "kill-standby":
        return _end_store(world, store)
    world = _close_links(world, store.incarnation)
    state = initial_state(
        settings(world), attempt=1, store=store.incarnation, now=world.now, standby=True, restarted=True
    )
    return _put_store(world, Store(store.incarnation, state))


def _put_store(world: World, store: Store) -> World:
    return replace(world, stores=tuple(store if s.incarnation == store.incarnation else s for s in world.stores))


def _close_links(world: World, incarnation: int) -> World:
    agents = (unlinked(a) if a.store == incarnation else a for a in world.agents)
    return replace(world, agents=tuple(agents))


def unlinked(a: Agent) -> Agent:
    """Return the agent without its link."""
    return replace(a, store=None, passive=False, outbox=(), inbox=())


def _agent_step(world: World, a: Agent, name: str) -> World:
    match name:
        case "connect" | "connect-old" | "connect-standby":
            number = {"connect": world.named, "connect-standby": a.standby}.get(name, world.stores[0].incarnation)
            store = world.store(number)
            assert store is not None
            return _connect(world, a, store)
        case "up":
            assert a.store is not None
            world = _put(world, replace(a, outbox=a.outbox[1:]))
            return _decide(world, a.store, NodeMessage(a.agent_id, a.outbox[0]))
        case "down":
            return _put(world, receive(replace(a, inbox=a.inbox[1:]), a.inbox[0]))
        case "warm":
            return _put(world, send(replace(a, ready=True), Ready()))
        case "work":
            return _put(world, _work(a))
        case "succeed":
            assert a.start is not None
            return _put(world, send(replace(a, state=MemberState.SUCCEEDED), WorkersSucceeded(a.start.round)))
        case "fail":
            assert a.start is not None
            failure = Failure(FailureClass.KILLED, a.pod, world.now, rank=a.start.rank)
            return _put(world, send(replace(a, state=MemberState.FAILED), WorkersFailed(a.start.round, failure)))
        case "sigterm":
            return _put(world, send(replace(a, leaving=True), Leaving("SIGTERM")))
        case "late":
            assert a.store is not None
            assert a.past is not None
            return _decide(world, a.store, NodeMessage(a.agent_id, a.past))
        case "pause" | "resume":
            return _put(world, replace(a, paused=name == "pause"))
        case "heal":
            return _put(world, replace(a, cut=False, cut_store=-1))
        case _:
            return _cut(world, a, name)


def _cut(world: World, a: Agent, name: str) -> World:
    """Apply crash, blip, cut or cut-store: the link closes, and the store notices that."""
    store, a = a.store, unlinked(a)
    if name == "cut-store":
        assert store is not None
        a = replace(a, cut_store=store)
    if name == "crash":
        a = replace(a, ended=Outcome.ERROR, state=MemberState.STOPPED)
    if name == "cut":
        a = replace(a, cut=True, frozen=a.busy)
    world = _put(world, a)
    return world if store is None else _decide(world, store, NodeDisconnected(a.agent_id))


def _connect(world: World, a: Agent, store: Store) -> World:
    if store.state.newer_store is not None:
        return world  # a closed store accepts no connection
    if store.incarnation < a.newest:
        return _decide(world, store.incarnation, NewerStoreSeen(a.newest))
    if a.store is not None:  # it waited at a standby store
        world = _cut(world, a, "blip")
        a = world.agent(a.index)
    membership = LastMembership(a.start, a.state) if a.start else None
    messages: list[NodeToCoordinator] = [
        Announce(a.index, a.incarnation, a.agent_id, a.pod, "ip", 1, 1, "default", a.ready, membership)
    ]
    if a.start and a.state is MemberState.STOPPED:
        messages.append(WorkersStopped(a.start.round, 1))
    if a.leaving:
        messages.append(Leaving("SIGTERM"))
    newest = newest_store(a, store)
    a = replace(
        a, store=store.incarnation, passive=store.state.passive, newest=newest, outbox=tuple(messages), inbox=()
    )
    return _put(world, a)


def newest_store(a: Agent, store: Store) -> int:
    """Return the highest incarnation that a node has met. A passive standby store does not count."""
    return a.newest if store.state.passive else store.incarnation


def send(a: Agent, message: NodeToCoordinator) -> Agent:
    return a if a.store is None else replace(a, outbox=(*a.outbox, message))


def receive(a: Agent, message: CoordinatorToNode | StoreToNode) -> Agent:
    if a.passive and not isinstance(message, StoreActive):
        return a  # it waits for a store that is active
    match message:
        case StartRound() if a.start is not None and message.round <= a.start.round:
            return replace(a, frozen=a.frozen and message.round != a.start.round)  # sent again after a reconnect
        case StartRound():
            assert a.state is MemberState.STOPPED, f"{a.pod} still runs {a.start} and is assigned {message.round}"
            past = WorkersStopped(a.start.round, 1) if a.start else None
            return replace(a, start=message, state=MemberState.STARTING, past=past, frozen=False)
        case EndRound() if a.start and message.round == a.start.round and a.state is not MemberState.STOPPED:
            return replace(a, stopping=True)
        case EndRound() if a.state is MemberState.STOPPED:
            return send(a, WorkersStopped(message.round, 1))
        case PlanEnd():
            return send(a, StepReport(message.round, None))
        case Finish():
            return replace(unlinked(a), ended=message.outcome, state=MemberState.STOPPED)
        case StandbyStore():
            return replace(a, standby=message.incarnation)
        case StoreActive():
            assert a.store is not None
            return replace(a, passive=False, newest=a.store)
        case _:
            return a


def _work(a: Agent) -> Agent:
    """Starting workers have started; stopping ones, and the siblings of a failed one, have stopped."""
    assert a.start is not None
    if a.state is MemberState.STARTING and not a.stopping:
        return send(replace(a, state=MemberState.RUNNING), WorkersStarted(a.start.round))
    a = replace(a, state=MemberState.STOPPED, stopping=False, frozen=False)
    return send(a, WorkersStopped(a.start.round, 1)) if a.start else a


def _put(world: World, agent: Agent) -> World:
    return replace(world, agents=tuple(agent if a.index == agent.index else a for a in world.agents))


def _decide(world: World, incarnation: int, event: CoordinatorEvent) -> World:
    store = next(s for s in world.stores if s.incarnation == incarnation)
    return after_decision(world, incarnation, rounds.decide(store.state, event, world.now))


def after_decision(world: World, incarnation: int, decision: RoundDecision) -> World:
    """Return the world after a store has made a decision: its messages are on their way."""
    stores = tuple(Store(incarnation, decision.state) if s.incarnation == incarnation else s for s in world.stores)
    # The coordinator knows the new link of a node once it has read the `Announce` on it.
    agents = {a.agent_id: a for a in world.agents if a.store == incarnation and not _announces(a)}
    for effect in decision.effects:
        if (a := agents.get(effect.agent_id)) is not None:
            agents[effect.agent_id] = replace(a, inbox=(*a.inbox, effect.message))
    world = replace(world, stores=stores, agents=tuple(agents.get(a.agent_id, a) for a in world.agents))
    if world.declared is None and decision.state.outcome is not None:
        world = replace(world, declared=decision.state.outcome)
    return _close_links(world, incarnation) if decision.state.newer_store is not None else world


# ---- the operator


def _operator_view(world: World, store: Store, read: World) -> OperatorView:
    """Return the operator's view for a store: the one that status names, or a standby store.

    `read`: the world with the status that the operator has read.
    """
    pods = tuple(
        ExpectedPod(a.index, a.incarnation, a.pod, _pod_state(world, a)) for a in world.agents if a.ended is None
    )
    view = OperatorView(
        1, world.sequence, settings(world), world.charged, world.charged_round, pods, serving=world.named
    )
    current = world.current
    report = build_report(current.state, world.now) if current is not None else None
    if store.incarnation != world.named:
        return replace(view, retired=store.incarnation != world.standby, newest_round=stores.formed_round(report))
    assert report is not None
    confirmed = stores.confirmable_request(
        report, world.before, older=_older(world), standby=standby_may_act(world, read)
    )
    standby = world.store(world.standby)
    return replace(
        view,
        confirmed_request=confirmed,
        confirmed_half=report.half_missing_round is not None,
        newest_round=stores.formed_round(world.before),
        standby_store=None if standby is None else StandbyStore(standby.incarnation, "ip", 1),
    )


def _older(world: World) -> bool:
    """Return whether an older store runs, or a node that trains is on its way from one.

    The real operator waits long enough for such nodes to arrive.
    """
    in_transit = (a for a in world.agents if a.agent_id in world.in_transit and a.busy and not a.cut)
    older = any(s.incarnation < world.named for s in world.stores)
    return older or any(a.store is None or _announces(a) for a in in_transit)


def standby_may_act(world: World, read: World) -> bool:
    """Return whether a standby store may be active, or become so: status names one, or one has not retired."""
    alive = any(s.incarnation > world.named and not s.state.retired for s in world.stores)
    return read.standby >= 0 or alive


def _announces(a: Agent) -> bool:
    return any(isinstance(message, Announce) for message in a.outbox)


def _pod_state(world: World, a: Agent) -> PodState:
    if a.leaving:
        return PodState.DRAINING
    return PodState.LOST if (a.index, a.incarnation) == (world.on_lost_node, 0) else PodState.RUNNING


def reported_outcome(world: World) -> Outcome | None:
    """Return the outcome of the job in the termination message of a pod; None without one."""
    outcomes = {a.ended for a in world.agents}
    return next((o for o in (Outcome.SUCCEEDED, Outcome.FAILED) if o in outcomes), None)


def _plan_stores(world: World) -> World:
    """Return the world with the stores that the operator wants, and the status that names them (`plan.stores`)."""
    taken_over = next((s for s in world.stores if s.incarnation > world.named and not s.state.passive), None)
    if taken_over is not None:
        world = _replace_store(world, -1) if world.current is not None else world
        world = replace(world, named=taken_over.incarnation, standby=-1)
    current = world.current
    if current is None:
        if world.store(world.standby) is None:
            kept = tuple(s for s in world.stores if s.incarnation != world.named)
            return _with_successor(world, kept)
        return replace(world, named=world.standby, standby=-1)
    report = build_report(current.state, world.now)
    if stores.must_retire(report) or world.store(world.standby) is None:
        world = replace(world, standby=-1)
    newer = any(s.incarnation > world.named for s in world.stores)
    if not world.with_standby or newer or not stores.may_have_standby(report):
        return world
    number = world.newest + 1
    state = initial_state(settings(world), attempt=1, store=number, now=world.now, standby=True)
    return replace(world, stores=(*world.stores, Store(number, state)), standby=number, newest=number)


def _has_news(world: World) -> bool:
    planned = _plan_stores(world)
    if planned != world:
        return True
    assert world.current is not None
    newest = world.current.state
    if newest.outcome is not None or reported_outcome(world) is not None:
        return newest.outcome is None
    indices = world.target + world.spares
    missing = any(a.ended is not None and a.index < indices for a in world.agents)
    surplus = any(a.ended is None and not a.leaving and a.index >= indices for a in world.agents)
    return missing or surplus or bool(_uncounted(world)) or any(_view_changed(world, s) for s in _linked(world))


def _view_changed(world: World, store: Store) -> bool:
    known = store.state.operator_view
    return _operator_view(world, store, world) != replace(known, lease=1, sequence=world.sequence)


def _linked(world: World) -> list[Store]:
    """Return the stores to which the operator has a link: the one that status names, and newer ones."""
    return [s for s in world.stores if s.incarnation >= world.named]


def _uncounted(world: World) -> list[tuple[RoundId, bool]]:
    assert world.current is not None
    ended = build_report(world.current.state, world.now).ended_rounds
    seen = world.charged_round
    return [(e.round, e.charged) for e in ended if seen is None or e.round > seen]


def _reconcile(world: World) -> World:
    """Reconcile the job: send an outcome that the store does not know, and nothing else.

    Without one: replace stores, count charges, replace ended pods, send the view, and drain pods beyond the target.
    """
    before, world = world, _plan_stores(world)
    current = world.current
    assert current is not None
    if (outcome := reported_outcome(world)) is not None:
        world = replace(world, sequence=world.sequence + 1)
        view = _operator_view(world, current, before)
        end = replace(view, pods=(), finish=Finish(outcome, "from a termination message"))
        return _decide(world, world.named, OperatorViewReceived(end))
    for round_id, charged in _uncounted(world):
        counted = (*world.counted, round_id) if charged else world.counted
        world = replace(world, charged=world.charged + charged, charged_round=round_id, counted=counted)
    for a in world.agents:
        if a.ended is not None and a.index < world.target + world.spares:
            world = _put(world, Agent(a.index, a.incarnation + 1))
    world = replace(world, sequence=world.sequence + 1)
    for store, view in [(s, _operator_view(world, s, before)) for s in _linked(world)]:
        world = _decide(world, store.incarnation, OperatorViewReceived(view))
    for a in world.agents:
        if a.ended is None and not a.leaving and a.index >= world.target + world.spares:
            world = _put(world, send(replace(a, leaving=True), Leaving("SIGTERM")))
    return world

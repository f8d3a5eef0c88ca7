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
    StartRound,
    StepReport,
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
FAULTS = (*AGENT_FAULTS, "restart-store", "second-store", "target", "operator-down")


@dataclass(frozen=True)
class Agent:
    index: int
    incarnation: int
    ready: bool = False
    store: int | None = None
    """The store it is connected to."""
    newest: int = 0
    """The highest incarnation of a store that it has connected to."""
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
    inbox: tuple[CoordinatorToNode, ...] = ()
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
    now: float = 0.0
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

    def agent(self, index: int) -> Agent:
        return next(a for a in self.agents if a.index == index)


def settings(world: World) -> RoundSettings:
    return RoundSettings(MIN, world.size - world.spares, world.target, spares=world.spares, max_restarts=BUDGET)


def begin(size: int = 3, spares: int = 0) -> World:
    world = World(size, (), (), target=size - spares, spares=spares)
    first = Store(0, initial_state(settings(world), attempt=1, store=0, now=0.0))
    return replace(world, stores=(first,), agents=tuple(Agent(index, 0) for index in range(size)))


def running(size: int = 3, spares: int = 0) -> World:
    """All nodes but the spares train in their second round, and the operator knows it."""
    world = _settle(begin(size, spares))
    return _settle(step(world, ("fail", size - spares - 1)))


def finishing(size: int = 3) -> World:
    """All workers have succeeded, the store has declared success, and one node has received it."""
    world = running(size)
    for index in range(size):
        world = step(step(world, ("succeed", index)), ("up", index))
    return step(world, ("down", 0))


def two_stores(size: int, moved: tuple[int, ...], *, confirmed: bool) -> World:
    """The operator has replaced a store that is still alive, and the nodes `moved` are connected to its successor.

    `confirmed`: before that, the operator confirmed the older store, and the other nodes started a round by themselves.
    """
    world = running(size)
    for index in moved:
        world = step(world, ("cut", index))
    world = _settle(step(world, ("tick", 0)), but=("tick", "heal")) if confirmed else world
    world = step(world, ("second-store", -1))
    for index in moved:
        world = step(step(world, ("heal", index)), ("connect", index))
    return world


def _settle(world: World, but: tuple[str, ...] = ("tick",)) -> World:
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
    if len(world.stores) > 1:
        yield "old-store-ends", 0
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
    """Yield the possible faults of these kinds."""
    for a in world.agents:
        yield from ((move, a.index) for move in kinds if move in AGENT_FAULTS and _possible(a, move))
    if "restart-store" in kinds:
        yield "restart-store", 0
    if "second-store" in kinds and len(world.stores) == 1:
        yield from (("second-store", index) for index in (-1, world.size - 1))
    if "target" in kinds:
        yield "target", MIN if world.target > MIN else world.size - world.spares
    if "operator-down" in kinds and not world.operator_down:
        yield "operator-down", 0


def _possible(a: Agent, move: str) -> bool:
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
            return _with_successor(_close_links(world, last.incarnation), world.stores[:-1], last)
        case "second-store":
            return _with_successor(_replace_store(world, index), world.stores, world.stores[-1])
        case "old-store-ends":
            newest = world.stores[-1].incarnation
            in_transit = frozenset(a.agent_id for a in world.agents if a.store != newest)
            world = _close_links(world, world.stores[0].incarnation)
            return replace(world, stores=world.stores[1:], in_transit=in_transit)
        case _:
            return _agent_step(world, world.agent(index), name)


def _with_successor(world: World, kept: tuple[Store, ...], last: Store) -> World:
    """Start a successor of `last`. In the model every start of a store has an incarnation of its own."""
    state = initial_state(settings(world), attempt=1, store=last.incarnation + 1, now=world.now, recovering=True)
    return replace(world, stores=(*kept, Store(last.incarnation + 1, state)))


def _replace_store(world: World, index: int) -> World:
    """The operator ends its link to the newest store and replaces it (`plan.stores`); the store may go on."""
    return replace(world, before=build_report(world.stores[-1].state, world.now), on_lost_node=index)


def _close_links(world: World, incarnation: int) -> World:
    agents = (replace(a, store=None, outbox=(), inbox=()) if a.store == incarnation else a for a in world.agents)
    return replace(world, agents=tuple(agents))


def _agent_step(world: World, a: Agent, name: str) -> World:
    match name:
        case "connect" | "connect-old":
            return _connect(world, a, world.stores[-1 if name == "connect" else 0])
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
            return _put(world, replace(a, cut=False))
        case _:
            return _cut(world, a, name)


def _cut(world: World, a: Agent, name: str) -> World:
    """Apply crash, blip or cut: the link closes, and the store notices that."""
    store, a = a.store, replace(a, store=None, outbox=(), inbox=())
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
    membership = LastMembership(a.start, a.state) if a.start else None
    messages: list[NodeToCoordinator] = [
        Announce(a.index, a.incarnation, a.agent_id, a.pod, "ip", 1, 1, "default", a.ready, membership)
    ]
    if a.start and a.state is MemberState.STOPPED:
        messages.append(WorkersStopped(a.start.round, 1))
    if a.leaving:
        messages.append(Leaving("SIGTERM"))
    return _put(world, replace(a, store=store.incarnation, newest=store.incarnation, outbox=tuple(messages), inbox=()))


def send(a: Agent, message: NodeToCoordinator) -> Agent:
    return a if a.store is None else replace(a, outbox=(*a.outbox, message))


def receive(a: Agent, message: CoordinatorToNode) -> Agent:
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
            return replace(a, ended=message.outcome, state=MemberState.STOPPED, store=None, outbox=(), inbox=())
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


def _operator_view(world: World) -> OperatorView:
    """Return the operator's view for the newest store, which status names."""
    pods = tuple(
        ExpectedPod(a.index, a.incarnation, a.pod, _pod_state(world, a)) for a in world.agents if a.ended is None
    )
    report = build_report(world.stores[-1].state, world.now)
    view = OperatorView(1, world.sequence, settings(world), world.charged, world.charged_round, pods)
    return replace(view, confirmed_request=stores.confirmable_request(report, world.before, older=_older(world)))


def _older(world: World) -> bool:
    """Return whether an older store runs, or a node that trains is on its way from one.

    The real operator waits long enough for such nodes to arrive.
    """
    in_transit = (a for a in world.agents if a.agent_id in world.in_transit and a.busy and not a.cut)
    return len(world.stores) > 1 or any(a.store is None or _announces(a) for a in in_transit)


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


def _has_news(world: World) -> bool:
    newest = world.stores[-1].state
    if newest.outcome is not None or reported_outcome(world) is not None:
        return newest.outcome is None
    known = newest.operator_view
    changed = _operator_view(world) != replace(known, lease=1, sequence=world.sequence)
    indices = world.target + world.spares
    missing = any(a.ended is not None and a.index < indices for a in world.agents)
    surplus = any(a.ended is None and not a.leaving and a.index >= indices for a in world.agents)
    return changed or missing or surplus or bool(_uncounted(world))


def _uncounted(world: World) -> list[tuple[RoundId, bool]]:
    ended = build_report(world.stores[-1].state, world.now).ended_rounds
    seen = world.charged_round
    return [(e.round, e.charged) for e in ended if seen is None or e.round > seen]


def _reconcile(world: World) -> World:
    """Reconcile the job: send an outcome that the store does not know, and nothing else.

    Without one: count charges, replace ended pods, send the view, and drain pods beyond the target.
    """
    if (outcome := reported_outcome(world)) is not None:
        world = replace(world, sequence=world.sequence + 1)
        end = replace(_operator_view(world), pods=(), finish=Finish(outcome, "from a termination message"))
        return _decide(world, world.stores[-1].incarnation, OperatorViewReceived(end))
    for round_id, charged in _uncounted(world):
        counted = (*world.counted, round_id) if charged else world.counted
        world = replace(world, charged=world.charged + charged, charged_round=round_id, counted=counted)
    for a in world.agents:
        if a.ended is not None and a.index < world.target + world.spares:
            world = _put(world, Agent(a.index, a.incarnation + 1))
    world = replace(world, sequence=world.sequence + 1)
    world = _decide(world, world.stores[-1].incarnation, OperatorViewReceived(_operator_view(world)))
    for a in world.agents:
        if a.ended is None and not a.leaving and a.index >= world.target + world.spares:
            world = _put(world, send(replace(a, leaving=True), Leaving("SIGTERM")))
    return world

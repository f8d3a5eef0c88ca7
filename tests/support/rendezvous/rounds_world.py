"""A world to explore: agents, links, an operator and up to three stores, each of which runs the product's decisions.

The agents run `machine.decide` (`rounds_agent`), the stores `rounds.decide_together`, the operator `plan`
(`rounds_operator`). Workers, links, kubelets and the clock are models. Everything is frozen data. `calm(world)` and
`faults(world)` yield the moves that are possible next; `step(world, move)` returns the world after a move and is
deterministic. The invariants are in `rounds_invariants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from elasticjob._runtime.agent.state_machine import decide as machine
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.contract.messages import (
    Announce,
    CoordinatorToAgent,
    EndReason,
    FailureClass,
    MemberState,
    OperatorView,
    Outcome,
    Report,
    RoundEnded,
    RoundSettings,
    StandbyStore,
    StartRound,
    StoreActive,
    StoreToAgent,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.decision import RoundDecision
from elasticjob._runtime.rendezvous.observations.report import build_report
from elasticjob._runtime.rendezvous.rounds import rounds
from elasticjob._runtime.rendezvous.state import (
    AgentDisconnected,
    AgentMessage,
    CoordinatorEvent,
    CoordinatorState,
    NewerStoreSeen,
    OperatorViewReceived,
    Tick,
    initial_state,
)
from elasticjob._runtime.store_pod.main import ROUNDS_PER_START
from elasticjob_operator.actions import (
    CreateStandbyStore,
    CreateStore,
    CreateStoreService,
    CreateWorker,
    DeletePod,
    DeleteService,
    UpdateStoreService,
)
from elasticjob_operator.model.job.spec import JobSpec
from elasticjob_operator.model.job.status import ConditionType
from elasticjob_operator.plan.context import AGENTS_SWITCH_SECONDS, STORE_UNRESPONSIVE_SECONDS
from support.rendezvous import rounds_operator, rounds_partition
from support.rendezvous.rounds_agent import Agent, crash, dispatch, fail, may_fail, new_agent, work, works
from support.rendezvous.rounds_operator import MIN, ById, Operator, StorePod, node_of
from support.rendezvous.rounds_options import PLAIN, JobOptions

BUDGET = 6
BEGIN = 1_000_000.0
"""The time at which a world begins, Unix seconds."""
PASSED = 60.0
"""Seconds that pass at the move `pass`."""
NOTICE_SECONDS = 30.0
"""Seconds from the announcement of a machine's end, the move `spot`, to that end. Its pods may run for longer here."""
Move = tuple[str, int]
"""The name of the move, and the index, target or group that it applies to."""

AGENT_FAULTS = (
    "crash", "vanish", "blip", "fail", "collective", "sigterm", "cut", "pause", "late", "succeed", "half-open", "deaf",
    "doubt",
)  # fmt: skip
_AGENT_FAULTS = (*AGENT_FAULTS, "cut-store", "exit", "spot")
FAULTS = (
    *AGENT_FAULTS, "restart-store", "restart-in-place", "second-store", "target", "operator-down", "old-view",
    "partition",
)  # fmt: skip
STANDBY_FAULTS = (
    "crash", "blip", "fail", "sigterm", "cut", "pause", "late", "succeed", "half-open", "cut-store", "restart-store",
    "restart-in-place", "second-store", "kill-standby", "restart-standby", "delay-view", "target", "operator-down",
)  # fmt: skip
"""Faults in a world with a standby store."""
OPTION_FAULTS = ("exit", "pass")
"""Moves that matter with some options of the job only: a worker exits by itself, and time passes without an event."""


@dataclass(frozen=True)
class Store:
    incarnation: int
    state: CoordinatorState
    starts: int = 0
    """How often its container has been restarted."""
    standby: bool = False
    """Whether it starts as a standby store."""
    queue: tuple[CoordinatorEvent, ...] = ()
    """Events that it has received and will decide together; always empty unless the world is `batched`."""
    node: str = ""
    created: float = BEGIN
    deleting: bool = False


@dataclass(frozen=True)
class History:
    """What happened in truth, which no part of the product knows."""

    failures: tuple[tuple[RoundId, str], ...] = ()
    """Rounds and pods of workers that failed by themselves."""
    exits: frozenset[tuple[RoundId, str]] = frozenset()
    """Those of them that ended with an exit code of their own, at the move `exit`."""
    succeeded: frozenset[tuple[RoundId, str]] = frozenset()
    """Rounds and pods of workers that ended with success."""
    crashes: tuple[str, ...] = ()
    """Pods whose container ended by itself."""
    ranks: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """For each store: the agent ids of the last round that it started or restored, by group rank."""
    confirmed: tuple[tuple[int, float], ...] = ()
    """For each store: the newest of its requests that the operator has confirmed."""
    collectives: int = 0
    """How many collectives broke because another member of the round did not run."""
    concluded: tuple[tuple[RoundId, bool, tuple[str, ...], str], ...] = ()
    """Rounds that a store concluded, whether it charged them, the pods that it counted as lost or did not find, and the
    kind of failure that was the cause, as the name of a move; empty without one."""
    recreated: frozenset[tuple[int, int, str]] = frozenset()
    """With restartStrategy Recreate, the members of rounds that a fault ended: store, its starts, and agent id."""


@dataclass(frozen=True)
class World:
    size: int
    """Indices, including those of spares."""
    stores: tuple[Store, ...]
    agents: tuple[Agent, ...]
    now: float = BEGIN
    target: int = 3
    code: int = 0
    """How often the job has been given other code."""
    spares: int = 0
    budget: int = BUDGET
    backoff: int = 0
    """`failurePolicy.backoffSeconds`."""
    batched: bool = False
    """Whether stores decide what they receive in batches, at the move `turn`."""
    reports_steps: bool = True
    """Whether the script reports its steps."""
    workers: int = 1
    """Workers of each node."""
    start_seconds: float | None = None
    """What the start of a process takes, as nodes report it; None: they do not know it."""
    asynchronous: bool = False
    """Whether devices work behind the host, so that an abort on one node may end a collective of another one."""
    options: JobOptions = PLAIN
    operator: Operator = field(default_factory=Operator)
    charged: int = 0
    charged_round: RoundId | None = None
    counted: tuple[RoundId, ...] = ()
    """Rounds that the operator has charged, in order."""
    counted_at: tuple[float, ...] = ()
    """When each of them ended."""
    declared: Outcome | None = None
    in_transit: frozenset[str] = frozenset()
    """Agent ids that were not connected to the newest store when the older one ended: it may not know their rounds."""
    with_standby: bool = False
    """Whether there is room for a standby store."""
    delays_view: bool = False
    """Whether the next view that the operator sends to the store is late."""
    late_view: tuple[int, OperatorView] | None = None
    """A view on its way to the store of this incarnation, later than those that follow it."""
    lost_nodes: tuple[tuple[str, float], ...] = ()
    """Kubernetes nodes whose kubelets no longer renew their leases, each with the time of the last renewal."""
    ends: tuple[tuple[str, float], ...] = ()
    """Kubernetes nodes whose end is announced, each with its time."""
    history: History = History()

    def agent(self, number: int) -> Agent:
        return next(a for a in self.agents if a.number == number)

    def store(self, incarnation: int) -> Store | None:
        return next((s for s in self.stores if s.incarnation == incarnation), None)

    @property
    def wanted(self) -> int:
        """The nodes that the job should have: a target that is off the step counts as the next lower size."""
        return self.target - (self.target - MIN) % self.options.increment

    @property
    def named(self) -> int:
        """Incarnation of the store that status names."""
        return self.operator.parsed.store_incarnation or 0

    @property
    def standby(self) -> Store | None:
        """The standby store that status names, if it runs."""
        number = self.operator.parsed.standby_store
        return None if number is None else self.store(number)

    @property
    def serving(self) -> tuple[Store, ...]:
        """The stores that status names or has named, oldest first: all but standby stores."""
        return tuple(s for s in self.stores if s.incarnation <= self.named)


def _spec(world: World) -> JobSpec:
    maximum, code = world.size - world.spares, f"code-{world.code}"
    return rounds_operator.job_spec(
        world.target, maximum, world.spares, world.budget, world.backoff, world.options, code
    )


def settings(world: World) -> RoundSettings:
    return _spec(world).settings


def begin(size: int = 3, spares: int = 0, budget: int = BUDGET, workers: int = 1, options: JobOptions = PLAIN) -> World:
    """Return a job that has just been applied: the operator has made its store and its pods."""
    world = World(size, (), (), target=size - spares, spares=spares, budget=budget, workers=workers, options=options)
    return _reconcile(world)


def running(size: int = 3, spares: int = 0, budget: int = BUDGET, workers: int = 1) -> World:
    """All nodes but the spares train in their second round, and the operator knows it."""
    world = settle(begin(size, spares, budget, workers))
    return settle(step(world, ("fail", size - spares - 1)))


def with_standby(size: int = 3, spares: int = 0) -> World:
    """All nodes but the spares have trained for a while, and a standby store exists that they know."""
    world = settle(replace(begin(size, spares), with_standby=True))
    world = settle(step(world, ("fail", size - spares - 1)))
    return replace(world, now=world.now + 2 * AGENTS_SWITCH_SECONDS)


def continued_without(size: int, lost: tuple[int, ...]) -> World:
    """The operator has confirmed the store, which goes on without the nodes `lost`. A new standby store exists."""
    world = with_standby(size)
    last = _formed_rounds(world)
    for index in lost:
        world = step(world, ("cut", index))
    while world.standby is None or _formed_rounds(world) <= last:
        world = settle(step(world, ("tick", 0)), but=("tick", "heal"))
    for index in lost:
        world = step(world, ("heal", index)) if any(a.number == index for a in world.agents) else world
    return world


def _formed_rounds(world: World) -> set[RoundId]:
    return {s.state.round.id for s in world.serving if s.state.round is not None and s.state.round.formed_at}


def moved_to_standby(size: int, moved: tuple[int, ...]) -> World:
    """The nodes `moved` cannot reach the store, and wait at the standby store."""
    world = with_standby(size)
    for index in moved:
        world = step(step(step(world, ("cut-store", index)), ("connect-standby", index)), ("up", index))
    return world


def finishing(size: int = 3) -> World:
    """All workers have succeeded, the store has declared success, and one node has received it."""
    world = running(size)
    for index in range(size):
        world = step(step(world, ("succeed", index)), ("up", index))
    return step(world, ("down", 0))


def charged(size: int = 3) -> World:
    """A worker has failed, status counts that, and no node has received the assignment to the next round."""
    world = step(running(size), ("fail", 0))
    while moves := [m for m in calm(world) if m[0] != "tick" and not _starts_a_round(world, m)]:
        world = step(world, moves[0])
    return world


def _starts_a_round(world: World, move: Move) -> bool:
    return move[0] == "down" and isinstance(world.agent(move[1]).inbox[0], StartRound)


def two_stores(size: int, moved: tuple[int, ...], *, confirmed: bool) -> World:
    """The operator has replaced a store that is still alive, and the nodes `moved` are connected to its successor.

    `confirmed`: before that, the operator confirmed the older store, and the other nodes started a round by themselves.
    """
    world = running(size)
    world = replace(world, now=world.now + 2 * AGENTS_SWITCH_SECONDS)
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
        yield from ((move, a.number) for move in _agent_moves(world, a))
    yield from (("turn", s.incarnation) for s in world.stores if s.queue)
    if world.operator.down:
        yield "operator-up", 0
    elif _has_news(world):
        yield "reconcile", 0
    yield from (("old-store-ends", s.incarnation) for s in world.stores if s.deleting)
    if world.late_view is not None:
        yield "view-arrives", 0
    if next(_deadlines(world), None) is not None:
        yield "tick", 0


def _agent_moves(world: World, a: Agent) -> Iterator[str]:
    if a.old_link is not None:
        yield from ("old-up", "old-closes") if a.old_outbox else ("old-closes",)
    if a.ended is not None:
        return
    if a.paused:
        yield "resume"
        return
    if a.cut or a.cut_store >= 0:
        yield "heal"
    if not a.cut:
        yield from _connections(world, a)
    if a.deaf:
        yield "notice"
    if a.outbox and not a.deaf:
        yield "up"
    if a.inbox:
        yield "down"
    if not a.ready:
        yield "warm"
    if a.deleting and (a.group or not a.cut) and not (a.machine.leave and a.machine.leave.signal):
        yield "kubelet"
    if works(a):
        yield "work"


def _connections(world: World, a: Agent) -> Iterator[str]:
    """Yield the moves by which a node connects: to any store without a link, else from a passive store to others."""
    if a.store is None or a.passive:
        moves = ("connect", "connect-old")[: len(world.serving)]
        moves = moves if a.store is not None else (*moves, "connect-standby")
        targets = ((move, _target(world, a, move)) for move in moves)
        yield from (m for m, s in targets if s is not None and s.incarnation not in (a.cut_store, a.store))


def _target(world: World, a: Agent, move: str) -> Store | None:
    """Return the store to which a node connects."""
    if move == "connect-standby":
        return world.store(a.standby)
    serving = world.serving
    return serving[-1 if move == "connect" else 0] if serving else None


def faults(world: World, kinds: tuple[str, ...] = FAULTS) -> Iterator[Move]:
    """Yield the possible faults of these kinds."""
    for a in world.agents:
        yield from ((move, a.number) for move in kinds if move in _AGENT_FAULTS and _possible(world, a, move))
    if "restart-store" in kinds and world.serving:
        yield "restart-store", 0
    if "restart-in-place" in kinds and world.serving:
        yield "restart-in-place", 0
    if world.standby is not None:
        yield from ((move, 0) for move in ("kill-standby", "restart-standby") if move in kinds)
    if "delay-view" in kinds and world.late_view is None and not world.delays_view:
        yield "delay-view", 0
    if "second-store" in kinds and len(world.serving) == 1 and not world.operator.down:
        yield from (("second-store", index) for index in (-1, world.size - 1))
    if "target" in kinds:
        yield from (("target", target) for target in _targets(world))
    if "update" in kinds:
        yield "update", 0
    if "pass" in kinds and all(due > world.now + PASSED for due in _deadlines(world)):
        yield "pass", 0
    if "operator-down" in kinds and not world.operator.down:
        yield "operator-down", 0
    if "old-view" in kinds and world.operator.before is not None and world.serving:
        yield "old-view", 0
    if "partition" in kinds:
        yield from (("partition", group) for group in rounds_partition.groups(world.agents))


def _targets(world: World) -> Iterator[int]:
    """Yield the smallest size, or the full one; for a job with steps also one that is off the step."""
    full = world.size - world.spares
    yield MIN if world.target > MIN else full
    if world.options.increment > 1 and world.target != full - 1:
        yield full - 1


def _possible(world: World, a: Agent, move: str) -> bool:
    if a.ended is not None or a.paused:
        return False
    match move:
        case "blip" | "cut":
            return a.store is not None
        case "spot":
            return node_of(a) not in dict(world.ends)
        case "cut-store":
            return a.store is not None and not (a.passive or a.deaf) and a.cut_store < 0
        case "half-open":
            return a.store is not None and not a.deaf and a.old_link is None and not _announces(a)
        case "deaf":
            return a.store is not None and not a.deaf and not _announces(a)
        case "doubt":
            return a.busy and a.store is not None and not (a.passive or a.deaf or a.outbox)
        case "sigterm":
            return not a.leaving
        case "fail" | "exit":
            return may_fail(a)
        case "collective":
            return a.training and _round_is_broken(world, a)
        case "succeed":
            return a.training and a.exited < a.workers
        case "late":
            return a.past is not None and a.store is not None
        case _:
            return True


def _round_is_broken(world: World, a: Agent) -> bool:
    """Return whether a collective of this node's workers fails, because a member of their round does not run."""
    peers = [b for b in world.agents if b.start and a.start and b.start.round == a.start.round]
    alive = [b for b in peers if b.training or b.machine.member is MemberState.SUCCEEDED]
    return a.start is not None and len(alive) < a.start.group_world_size


def _deadlines(world: World) -> Iterator[float]:
    """Yield the times at which something happens by itself, if nothing else happens before."""
    for s in world.stores:
        if (due := rounds.next_deadline(s.state, world.now)) is not None:
            yield due
    yield from (a.timer for a in world.agents if a.timer is not None and a.timer > world.now and not a.paused)
    due = world.operator.requeue_at
    if due is not None and due > world.now and not world.operator.down:
        yield due


# ---- effects of moves


def step(world: World, move: Move) -> World:
    return _freeze(_step(world, move))


def _freeze(world: World) -> World:
    """Let the nodes that are cut off act on that, group rank 0 before those that have a link to it."""
    for rank_zero in (True, False):
        for a in world.agents:
            if a.start and (a.start.group_rank == 0) is rank_zero and rounds_partition.must_freeze(world.agents, a):
                world = _put(world, dispatch(a, events.CutOff(), world.now))
    return world


def _step(world: World, move: Move) -> World:
    name, index = move
    match name:
        case "tick":
            return _tick(world)
        case "turn":
            return _turn(world, index)
        case "reconcile":
            return _reconcile(world)
        case "operator-down" | "operator-up":
            restarted = rounds_operator.restarted(world.operator, world.now)
            return replace(world, operator=replace(restarted, down=name == "operator-down"))
        case "old-view":
            assert world.operator.before is not None
            return _decide(world, world.serving[-1].incarnation, OperatorViewReceived(world.operator.before))
        case "target":
            return replace(world, target=index)
        case "update":
            return replace(world, code=world.code + 1)
        case "pass":
            return replace(world, now=world.now + PASSED)
        case "partition":
            return _partition(world, index)
        case "restart-store":
            return _end_store(world, world.serving[-1].incarnation)
        case "restart-in-place":
            return _restart_in_place(world, world.serving[-1])
        case "kill-standby" | "restart-standby":
            assert world.standby is not None
            if name == "kill-standby":
                return _end_store(world, world.standby.incarnation)
            return _restart_in_place(world, world.standby)
        case "delay-view":
            return replace(world, delays_view=True)
        case "view-arrives":
            assert world.late_view is not None
            number, view = world.late_view
            return _decide(replace(world, late_view=None), number, OperatorViewReceived(view))
        case "second-store":
            return _second_store(world, index)
        case "old-store-ends":
            return _end_store(world, index)
        case _:
            return _agent_step(world, world.agent(index), name)


def _tick(world: World) -> World:
    world = replace(world, now=min(_deadlines(world)))
    for store in world.stores:
        world = _decide(world, store.incarnation, Tick())
    for a in world.agents:
        if a.timer is not None and a.timer <= world.now and not a.paused and a.ended is None:
            world = _put(world, dispatch(replace(a, timer=None), events.LeaveTimedOut(), world.now))
    return world


def _turn(world: World, incarnation: int) -> World:
    """Let a store decide on all that it has received."""
    store = world.store(incarnation)
    assert store is not None
    decision = rounds.decide_together(store.state, store.queue, world.now)
    return after_decision(_put_store(world, replace(store, queue=())), incarnation, decision)


def _end_store(world: World, incarnation: int) -> World:
    """End a store: its pod is gone, and the operator sees that."""
    left = tuple(s for s in world.stores if s.incarnation != incarnation)
    serving = [s.incarnation for s in left if s.incarnation <= world.named]
    ended = world.store(incarnation)
    if serving and ended is not None and not ended.state.retired:
        in_transit = frozenset(a.agent_id for a in world.agents if a.store != serving[-1])
        world = replace(world, in_transit=in_transit)
    world = replace(_close_links(world, incarnation), stores=left)
    if world.operator.linked == incarnation:
        world = replace(world, operator=rounds_operator.disconnected(world.operator, world.now))
    return world


def _restart_in_place(world: World, store: Store) -> World:
    """Restart the container of a store: the same incarnation without its memory."""
    world = _close_links(world, store.incarnation)
    starts = store.starts + 1
    state = initial_state(
        settings(world), attempt=1, store=store.incarnation, now=world.now, recovering=True,
        round_number=starts * ROUNDS_PER_START, standby=store.standby, restarted=True,
    )  # fmt: skip
    world = _put_store(world, replace(store, state=state, starts=starts, queue=()))
    ranks = tuple(known for known in world.history.ranks if known[0] != store.incarnation)
    world = replace(world, history=replace(world.history, ranks=ranks))
    if world.operator.linked == store.incarnation:
        lost = rounds_operator.disconnected(world.operator, world.now)
        world = replace(world, operator=replace(lost, address=None))
    if world.operator.standby_address == store.incarnation:
        world = replace(world, operator=rounds_operator.with_standby_link(world.operator, None, world.now))
    return world


def _second_store(world: World, index: int) -> World:
    """The operator no longer reaches the store, which goes on, and replaces it.

    With an index the operator believes that the Kubernetes node of that index's first pod, and of the store, is lost.
    """
    store = world.serving[-1]
    if index >= 0:
        node = node_of(new_agent(index, 0, 0.0))
        world = _put_store(world, replace(store, node=node))
        world = replace(world, lost_nodes=(*world.lost_nodes, (node, world.now)))
    if world.operator.linked == store.incarnation:
        silent = rounds_operator.disconnected(world.operator, world.now - STORE_UNRESPONSIVE_SECONDS)
        world = replace(world, operator=replace(silent, silent_since=world.now))
    world = _reconcile(world)
    if world.operator.silent_since is not None and world.named == store.incarnation:
        # The operator keeps a store that it was never connected to.
        return replace(world, operator=replace(world.operator, silent_since=None, address=None))
    return world


def _close_links(world: World, incarnation: int) -> World:
    agents = (_without_links(a, incarnation) for a in world.agents)
    return replace(world, agents=tuple(agents))


def _without_links(a: Agent, incarnation: int) -> Agent:
    if a.old_link == incarnation:
        a = replace(a, old_link=None, old_outbox=())
    return _unlinked(a) if a.store == incarnation else a


def _unlinked(a: Agent) -> Agent:
    return replace(a, store=None, passive=False, deaf=False, outbox=(), inbox=())


def _agent_step(world: World, a: Agent, name: str) -> World:
    now = world.now
    match name:
        case "connect" | "connect-old" | "connect-standby":
            store = _target(world, a, name)
            assert store is not None
            return _connect(world, a, store)
        case "up":
            return _deliver(world, a)
        case "down":
            return _put(world, receive(replace(a, inbox=a.inbox[1:]), a.inbox[0], now))
        case "old-up":
            assert a.old_link is not None
            world = _put(world, replace(a, old_outbox=a.old_outbox[1:]))
            return _decide(world, a.old_link, AgentMessage(a.agent_id, a.old_outbox[0]))
        case "old-closes":
            assert a.old_link is not None
            world = _put(world, replace(a, old_link=None, old_outbox=()))
            return _decide(world, a.old_link, AgentDisconnected(a.agent_id))
        case "notice":
            return _put(world, _unlinked(a))
        case "warm":
            return _put(world, dispatch(a, events.LauncherReady(), now))
        case "work":
            known = world.start_seconds if world.reports_steps else None
            broken = frozenset(b.broke for b in world.agents if b.broke and b != a) if world.asynchronous else None
            return _put(world, work(a, now, reports_steps=world.reports_steps, start_seconds=known, broken=broken))
        case "succeed":
            return _succeed(world, a)
        case "fail" | "exit":
            return _fail(world, a, name)
        case "collective":
            history = replace(world.history, collectives=world.history.collectives + 1)
            return _put(replace(world, history=history), fail(a, FailureClass.COLLECTIVE_FAILED, now))
        case "sigterm" | "kubelet":
            return _put(world, dispatch(replace(a, deleting=True), events.SignalReceived("SIGTERM"), now))
        case "late":
            assert a.store is not None
            assert a.past is not None
            return _decide(world, a.store, AgentMessage(a.agent_id, a.past))
        case "spot":
            return replace(world, ends=(*world.ends, (node_of(a), now + NOTICE_SECONDS)))
        case "pause" | "resume":
            return _put(world, replace(a, paused=name == "pause"))
        case "doubt":
            return _doubt(world, a)
        case "heal":
            lost = tuple(node for node in world.lost_nodes if node[0] != node_of(a))
            return _put(replace(world, lost_nodes=lost), replace(a, cut=False, cut_store=-1, group=0))
        case _:
            return _cut(world, a, name)


def _deliver(world: World, a: Agent) -> World:
    """Let the store read the first message of a node. Its `Announce` replaces an older link of the node."""
    assert a.store is not None
    store, message = a.store, a.outbox[0]
    if isinstance(message, Announce) and a.old_link == store:
        a = replace(a, old_link=None, old_outbox=())
    world = _put(world, replace(a, outbox=a.outbox[1:]))
    return _decide(world, store, AgentMessage(a.agent_id, message))


def _doubt(world: World, a: Agent) -> World:
    """Let a node have had no answer for a while: it freezes its workers, and greets the store over the same link."""
    assert a.store is not None
    store, a = a.store, dispatch(a, events.CutOff(), world.now)
    world = _put(world, a)
    for message in machine.greeting(a.machine):
        world = _decide(world, store, AgentMessage(a.agent_id, message))
    return world


def _succeed(world: World, a: Agent) -> World:
    assert a.start is not None
    round_id, done = a.start.round, (a.start.round, a.pod)
    a = replace(a, exited=a.exited + 1)
    if a.exited == a.workers:
        history = replace(world.history, succeeded=world.history.succeeded | {done})
        world, a = replace(world, history=history), replace(a, stops_at=None)
    return _put(world, dispatch(a, events.WorkerEnded(round_id, a.exited - 1), world.now))


def _fail(world: World, a: Agent, move: str) -> World:
    assert a.start is not None
    failed = (a.start.round, a.pod)
    exits = world.history.exits | ({failed} if move == "exit" else set())
    history = replace(world.history, failures=(*world.history.failures, failed), exits=exits)
    kind = FailureClass.USER_ERROR if move == "exit" else FailureClass.KILLED
    return _put(replace(world, history=history), fail(a, kind, world.now))


def _cut(world: World, a: Agent, name: str) -> World:
    """Apply crash, vanish, or the loss of a link: by one side or by both."""
    store, known, now = a.store, not _announces(a) and not a.deaf, world.now
    if name == "deaf":
        world = _put(world, replace(a, deaf=True, outbox=()))
    elif name == "half-open":
        return _put(world, replace(_unlinked(a), old_link=store, old_outbox=a.outbox))
    elif name == "crash":
        world = replace(world, history=replace(world.history, crashes=(*world.history.crashes, a.pod)))
        world = _put(world, crash(a, now))
    elif name == "vanish":
        world = _put(world, crash(a, now))
        world = replace(world, agents=tuple(b for b in world.agents if b.number != a.number))
    elif name == "cut":
        a = replace(_unlinked(a), cut=True, cut_at=now)
        world = replace(world, lost_nodes=(*world.lost_nodes, (node_of(a), now)))
        world = _put(world, dispatch(a, events.CutOff(), now) if a.busy else a)
    elif name == "cut-store":
        assert store is not None
        world = _put(world, replace(_unlinked(a), cut_store=store))
    else:
        world = _put(world, _unlinked(a))
    return world if store is None or not known else _decide(world, store, AgentDisconnected(a.agent_id))


def _partition(world: World, group: int) -> World:
    """Cut the links between a group of nodes and their stores. Their kubelets go on reporting."""
    members = rounds_partition.members_of(world.agents, group)
    for a in members:
        world = _put(world, replace(_unlinked(a), cut=True, cut_at=world.now, group=group))
    world = _freeze(world)
    for a in members:
        if a.store is not None and not (_announces(a) or a.deaf):
            world = _decide(world, a.store, AgentDisconnected(a.agent_id))
    return world


def _connect(world: World, a: Agent, store: Store) -> World:
    if store.state.newer_store is not None:
        return world  # a closed store accepts no connection
    if store.incarnation < a.newest:
        return _decide(world, store.incarnation, NewerStoreSeen(a.newest))
    if a.store is not None:  # it waited at a standby store
        world = _cut(world, a, "blip")
        a = world.agent(a.number)
    greeting, passive = machine.greeting(a.machine), store.state.passive
    a = replace(a, store=store.incarnation, passive=passive, newest=newest_store(a, store), outbox=greeting, inbox=())
    return _put(world, a)


def newest_store(a: Agent, store: Store) -> int:
    """Return the highest incarnation that a node has met. A passive standby store does not count."""
    return a.newest if store.state.passive else store.incarnation


def receive(a: Agent, message: CoordinatorToAgent | StoreToAgent, now: float) -> Agent:
    """Let an agent act on a message of its store, as its client does (`CoordinatorClient`)."""
    if isinstance(message, StoreActive):
        return replace(a, passive=False, newest=a.newest if a.store is None else a.store)
    if a.passive:
        return a  # it waits until the store is active
    if isinstance(message, StandbyStore):
        return replace(a, standby=message.incarnation)
    a = dispatch(a, events.Received(message), now)
    return _unlinked(a) if a.ended is not None else a


def _put(world: World, agent: Agent) -> World:
    agents = (agent if a.number == agent.number else a for a in world.agents)
    gone = agent.ended is not None and agent.deleting
    if agent.ended is not None and agent.store is not None:
        # The process has ended: the store reads what it sent, and sees that its link closes.
        closed = replace(_unlinked(agent), old_link=agent.store, old_outbox=agent.outbox)
        known = not (_announces(agent) or agent.deaf) and agent.old_link is None
        agents = (closed if known and a.number == agent.number else a for a in agents)
    world = replace(world, agents=tuple(agents))
    return world if not gone else _remove_pod(world, agent)


def _remove_pod(world: World, agent: Agent) -> World:
    """Remove the object of a pod that was being deleted; its last messages reach the store first."""
    last = world.agent(agent.number)
    if last.old_link is not None:
        for message in last.old_outbox:
            world = _decide(world, last.old_link, AgentMessage(last.agent_id, message))
        world = _decide(world, last.old_link, AgentDisconnected(last.agent_id))
    return replace(world, agents=tuple(a for a in world.agents if a.number != agent.number))


def _put_store(world: World, store: Store) -> World:
    stores = tuple(store if s.incarnation == store.incarnation else s for s in world.stores)
    return replace(world, stores=stores)


def _decide(world: World, incarnation: int, event: CoordinatorEvent) -> World:
    """Let a store decide on an event, or queue it if the world is batched."""
    store = world.store(incarnation)
    if store is None:
        return world
    if world.batched:
        return _put_store(world, replace(store, queue=(*store.queue, event)))
    return after_decision(world, incarnation, rounds.decide(store.state, event, world.now))


def after_decision(world: World, incarnation: int, decision: RoundDecision) -> World:
    """Return the world after a store has made a decision: its messages are on their way."""
    store = world.store(incarnation)
    assert store is not None
    concluded = _concluded(world, store.state, decision.state)
    recreated = world.history.recreated | _recreated(world, store, decision.state)
    world = _put_store(world, replace(store, state=decision.state))
    history = replace(world.history, concluded=world.history.concluded + concluded, recreated=recreated)
    world = replace(world, history=history)
    # The coordinator knows the new link of a node once it has read the `Announce` on it.
    agents = {a.agent_id: a for a in world.agents if a.store == incarnation and not a.deaf and not _announces(a)}
    for effect in decision.effects:
        if (a := agents.get(effect.agent_id)) is not None:
            agents[effect.agent_id] = replace(a, inbox=(*a.inbox, effect.message))
    world = replace(world, agents=tuple(agents.get(a.agent_id, a) for a in world.agents))
    if world.declared is None and decision.state.outcome is not None:
        world = replace(world, declared=decision.state.outcome)
    world = replace(world, history=_with_ranks(world.history, incarnation, decision.state))
    return _close_links(world, incarnation) if decision.state.newer_store is not None else world


def ended_rounds_since(before: CoordinatorState, after: CoordinatorState) -> tuple[RoundEnded, ...]:
    """Return the rounds that a decision has ended."""
    known = {e.round for e in before.ended_rounds}
    return tuple(e for e in after.ended_rounds if e.round not in known)


def _concluded(
    world: World, before: CoordinatorState, after: CoordinatorState
) -> tuple[tuple[RoundId, bool, tuple[str, ...], str], ...]:
    ended_rounds = ended_rounds_since(before, after)
    lost = {e.round: e.lost_pods + _not_found(world, before, e) for e in ended_rounds}
    return tuple((e.round, e.charged, lost[e.round], kind_of_failure(world, e)) for e in ended_rounds)


def _not_found(world: World, before: CoordinatorState, ended: RoundEnded) -> tuple[str, ...]:
    """Return the pods that were lost with a restored round without the store's knowing their names."""
    if ended.reason is not EndReason.AGENT_LOST:
        return ()
    members = [a.pod for a in world.agents if a.start is not None and a.start.round == ended.round]
    if before.round is not None and before.round.id == ended.round:
        found = {m.pod for m in before.round.members.values()}
    else:
        found = {n.pod for n in before.agents.values() if n.membership and n.membership.assignment.round == ended.round}
    return tuple(pod for pod in members if pod not in found)


def kind_of_failure(world: World, ended: RoundEnded) -> str:
    """Return the move that was, in truth, the failure which a store calls the cause; empty without a cause."""
    if ended.failure is None:
        return ""
    if ended.failure.kind is FailureClass.COLLECTIVE_FAILED:
        return "collective"
    return "exit" if (ended.round, ended.failure.pod) in world.history.exits else "fail"


def _recreated(world: World, store: Store, after: CoordinatorState) -> frozenset[tuple[int, int, str]]:
    """Return the members of a round that a fault has just ended, if their pods must be replaced."""
    round_, faults = store.state.round, (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)
    ended = {e.round for e in ended_rounds_since(store.state, after) if e.reason in faults}
    if not world.options.recreate or round_ is None or round_.id not in ended:
        return frozenset()
    return frozenset((store.incarnation, store.starts, agent_id) for agent_id in round_.members)


def _with_ranks(history: History, incarnation: int, state: CoordinatorState) -> History:
    if state.round is None:
        return history
    members = sorted(state.round.members.items(), key=lambda item: item[1].assignment.group_rank)
    ranks = dict(history.ranks) | {incarnation: tuple(agent_id for agent_id, _ in members)}
    return replace(history, ranks=tuple(sorted(ranks.items())))


# ---- the operator


def _older(world: World) -> bool:
    """Return whether an older store runs, or a node that trains is on its way from one.

    The real operator waits long enough for such nodes to arrive.
    """
    in_transit = (a for a in world.agents if a.agent_id in world.in_transit and a.busy and not a.cut)
    return len(world.serving) > 1 or any(a.store is None or _announces(a) for a in in_transit)


def _standby_may_act(world: World) -> bool:
    """Return whether a newer store than the one in status runs that has not retired, or one has ended just now."""
    return any(s.incarnation > world.named and not s.state.retired for s in world.stores) or _older(world)


def _announces(a: Agent) -> bool:
    return any(isinstance(message, Announce) for message in a.outbox)


@lru_cache(maxsize=2000)
def _cached_report(state: ById, now: float) -> Report:
    return build_report(state.value, now)


def _report(world: World, store: Store) -> Report:
    return _cached_report(ById(store.state), world.now)


def _dialed(world: World) -> Store | None:
    """Return the store to which the operator's link leads; None if it reaches none."""
    operator = world.operator
    if operator.down or operator.silent_since is not None or operator.linked is None:
        return None
    return world.store(operator.linked)


def _inputs(world: World) -> object:
    """Return all that makes the operator reconcile the job when it changes."""
    store = _dialed(world)
    pods = rounds_operator.worker_pods(world.agents, world.now)
    stores = tuple((s.incarnation, s.starts, s.deleting) for s in world.stores)
    standby = None if world.operator.standby_address is None else world.store(world.operator.standby_address)
    reports = tuple(None if s is None else _report(world, s) for s in (store, standby))
    return (reports, pods, stores, world.target, world.code, world.ends)


def _has_news(world: World) -> bool:
    due = world.operator.requeue_at
    return (due is not None and due <= world.now) or _inputs(world) != world.operator.inputs


def _leases(world: World) -> dict[str, float]:
    """Return when the kubelets have renewed their leases: those of reachable nodes do it all the time."""
    nodes = {node_of(a): world.now for a in world.agents} | {s.node: world.now for s in world.stores}
    return nodes | dict(world.lost_nodes)


def _reconcile(world: World) -> World:
    """Reconcile the job as the controller does: observe, plan, write status, send the view, act."""
    operator = world.operator
    if operator.older_store_at == 0.0 or _older(world):
        operator = replace(operator, older_store_at=world.now)
    if any(s.incarnation > world.named for s in world.stores) and not _standby_may_act(world):
        operator = replace(operator, standby_store_at=0.0)
    elif operator.standby_store_at is None or _standby_may_act(world):
        operator = replace(operator, standby_store_at=world.now)
    if operator.store_named[0] != operator.parsed.store_incarnation:
        operator = replace(operator, store_named=(operator.parsed.store_incarnation, world.now))
    if (store := _dialed(world)) is not None:
        operator = rounds_operator.with_report(operator, _report(world, store), world.now)
    operator = _with_standby_report(world, operator)
    inputs = _inputs(world)
    stores = tuple(StorePod(s.incarnation, s.node, s.created, s.deleting) for s in world.stores)
    decided = rounds_operator.reconcile(
        operator, _spec(world), world.agents, stores, _leases(world), world.ends, world.now
    )
    status = operator.status if decided.status is None else decided.status
    asks_again = decided.requeue_after is not None and decided.requeue_after < rounds_operator.NEVER / 2
    requeue_at = world.now + decided.requeue_after if decided.requeue_after is not None and asks_again else None
    before = operator
    operator = replace(operator, status=status, inputs=inputs, requeue_at=requeue_at)
    world = _count(replace(world, operator=operator), before)
    address = decided.store_address.incarnation if decided.store_address else None
    standby = decided.standby_address.incarnation if decided.standby_address else None
    world = _dial_standby(_dial(world, address), standby)
    if decided.operator_view is not None and _dialed(world) is not None:
        world = _send_view(world, decided.operator_view)
    if decided.standby_view is not None and world.operator.standby_linked:
        world = _send_standby_view(world, decided.standby_view)
    for action in decided.actions:
        world = _act(world, action)
    if decided.actions:
        # The operator watches what it writes.
        world = replace(world, operator=replace(world.operator, inputs=None))
    return world


def _with_standby_report(world: World, operator: Operator) -> Operator:
    store = None if operator.standby_address is None else world.store(operator.standby_address)
    return rounds_operator.with_standby_link(operator, None if store is None else _report(world, store), world.now)


def _dial_standby(world: World, address: int | None) -> World:
    operator = world.operator
    if address != operator.standby_address:
        operator = replace(
            operator, standby_address=address, standby_report=None, standby_sent=None, standby_linked=False,
            standby_since=world.now,
        )  # fmt: skip
    return replace(world, operator=_with_standby_report(world, operator))


def _send_standby_view(world: World, view: OperatorView) -> World:
    operator = world.operator
    if operator.standby_sent is not None and replace(operator.standby_sent, lease=0, sequence=0, sent_at=0.0) == view:
        return world
    assert operator.standby_address is not None
    view = rounds_operator.numbered(operator, view, world.now)
    world = replace(world, operator=replace(operator, sequence=view.sequence, standby_sent=view))
    return _decide(world, operator.standby_address, OperatorViewReceived(view))


def _count(world: World, before: Operator) -> World:
    """Note which rounds a status write has charged."""
    old, new = before.parsed, world.operator.parsed
    ended = before.report.ended_rounds if before.report is not None else ()
    rounds_charged = sorted(
        (e.round, e.time) for e in ended
        if e.charged and (old.charged_round is None or e.round > old.charged_round)
        and new.charged_round is not None and e.round <= new.charged_round
    )  # fmt: skip
    return replace(
        world, charged=new.restarts_counted, charged_round=new.charged_round,
        counted=(*world.counted, *(r for r, _ in rounds_charged)),
        counted_at=(*world.counted_at, *(time for _, time in rounds_charged)),
        declared=world.declared or status_outcome(world),
    )  # fmt: skip


def status_outcome(world: World) -> Outcome | None:
    """Return the outcome that the job's status declares."""
    status = world.operator.parsed
    if status.is_true(ConditionType.SUCCESS_CRITERIA_MET) or status.is_true(ConditionType.COMPLETE):
        return Outcome.SUCCEEDED
    return Outcome.FAILED if status.is_true(ConditionType.FAILURE_TARGET) else None


def _dial(world: World, address: int | None) -> World:
    operator = world.operator
    if address is not None and address == operator.standby_address and operator.standby_linked:
        return replace(world, operator=rounds_operator.promoted(operator, world.now))
    if address == operator.address and (operator.linked is not None or operator.silent_since is not None):
        return world
    if address is None or world.store(address) is None:
        # No store serves; the reports of the last one are kept.
        gone = operator if operator.linked is None else rounds_operator.disconnected(operator, world.now)
        return replace(world, operator=replace(gone, address=address, linked=None))
    world = replace(world, operator=rounds_operator.connected(operator, address, world.now))
    store = world.store(address)
    assert store is not None
    return replace(world, operator=rounds_operator.with_report(world.operator, _report(world, store), world.now))


def _send_view(world: World, view: OperatorView) -> World:
    """Send the view unless the store has it."""
    operator = world.operator
    if operator.sent is not None and replace(operator.sent, lease=0, sequence=0, sent_at=0.0) == view:
        return world
    view = rounds_operator.numbered(operator, view, world.now)
    assert operator.linked is not None
    if view.confirmed_request:
        confirmed = dict(world.history.confirmed) | {operator.linked: view.confirmed_request}
        history = replace(world.history, confirmed=tuple(sorted(confirmed.items())))
        world = replace(world, history=history)
    before = operator.sent or operator.before
    world = replace(world, operator=replace(operator, sequence=view.sequence, sent=view, before=before))
    if world.delays_view:
        return replace(world, delays_view=False, late_view=(operator.linked, view))
    return _decide(world, operator.linked, OperatorViewReceived(view))


def _act(world: World, action: object) -> World:
    match action:
        case CreateStandbyStore(name, _) if not world.with_standby:
            refusals = (*world.operator.refusals, name)
            return replace(world, operator=replace(world.operator, refusals=refusals))
        case CreateStore(name, incarnation) | CreateStandbyStore(name, incarnation):
            standby = isinstance(action, CreateStandbyStore)
            refusals = tuple(refused for refused in world.operator.refusals if refused != name)
            world = replace(world, operator=replace(world.operator, refusals=refusals))
            state = initial_state(
                settings(world), attempt=1, store=incarnation, now=world.now, recovering=incarnation > 0,
                standby=standby,
            )  # fmt: skip
            store = Store(incarnation, state, standby=standby, node=f"store-{incarnation}", created=world.now)
            stores = sorted((*world.stores, store), key=lambda s: s.incarnation)
            return replace(world, stores=tuple(stores))
        case CreateStoreService(incarnation) | UpdateStoreService(_, incarnation):
            return replace(world, operator=replace(world.operator, service=incarnation))
        case CreateWorker(_, index, incarnation):
            return replace(world, agents=(*world.agents, new_agent(index, incarnation, world.now, world.workers)))
        case DeleteService():
            return replace(world, operator=replace(world.operator, services=False))
        case DeletePod(name, _, _, force):
            return _delete(world, name, force=force)
        case _:
            return world


def _delete(world: World, name: str, *, force: bool) -> World:
    for s in world.stores:
        if name == f"bert-rdzv-{s.incarnation}":
            return _end_store(world, s.incarnation) if force else _put_store(world, replace(s, deleting=True))
    for a in world.agents:
        if name == a.pod and (a.ended is not None or force):
            return replace(world, agents=tuple(b for b in world.agents if b.number != a.number))
        if name == a.pod:
            return _put(world, replace(a, deleting=True))
    return world

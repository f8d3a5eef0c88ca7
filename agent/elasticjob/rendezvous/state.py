"""What a coordinator knows, as frozen data, and the questions its rules ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from elasticjob.contract.messages import (
    EndReason,
    Facts,
    Failure,
    FromNode,
    Membership,
    MemberState,
    Outcome,
    PodFact,
    PodState,
    RoundEnded,
    Settings,
    StartRound,
    ToNode,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.persistent_map import put

BLIP_GRACE = 0.25
"""Seconds that a node whose link closed has to come back: a blip is not a death."""
RECOVERY_TIMEOUT = 10.0
"""Seconds from the first node's announcement that a successor store waits for the others of a round."""
LOST_TIMEOUT = 1.0
"""The same for those whose node is lost: all lost their store together, and look for another once a second."""
STOP_TIMEOUT = 30.0
"""Seconds beyond the stop grace after which a member that does not report its workers' end counts as lost."""


@dataclass(frozen=True)
class Node:
    """A node that has announced itself; known by its boot id."""

    boot: str
    slot: int
    incarnation: int
    pod: str
    address: str
    store_port: int
    local_world_size: int
    role: str
    ready: bool = False
    leaving: str = ""
    """Why it was told to go; empty while it stays."""
    gone_at: float | None = None
    """When its link closed; None while it is up."""
    stale: RoundId | None = None
    """A round of the past whose workers may still run there: they must stop before it may join."""
    membership: Membership | None = None
    """What became of its last round; kept and read only while recovering."""
    failure: Failure | None = None
    """Its failure in that round, if it told one while recovering."""
    warm_off: str = ""
    """Why its workers start by exec, if they do and nobody asked for it."""

    def lost(self, now: float) -> bool:
        return self.gone_at is not None and now >= self.gone_at + BLIP_GRACE


@dataclass(frozen=True)
class Member:
    """A node's part in the current round."""

    assignment: StartRound
    pod: str
    local_world_size: int
    state: MemberState = MemberState.STARTING
    lost: bool = False

    @property
    def accounted(self) -> bool:
        """Nothing of the round can still run there, as far as anybody can know."""
        return self.lost or self.state is MemberState.STOPPED


@dataclass(frozen=True)
class Plan:
    """Where a round is to stop; `last_step` is None while members are asked for theirs (see `planned`)."""

    steps: Mapping[str, int | None] = field(default_factory=dict)
    """What members answered, by boot id."""
    last_step: int | None = None


@dataclass(frozen=True)
class Ending:
    """A round that is being stopped: at once, or on a plan."""

    reason: EndReason
    message: str
    since: float
    planned: bool = False
    plan: Plan | None = None
    """None once members are told to stop at once."""


@dataclass(frozen=True)
class Round:
    """The current round; `members` by boot id in order of group rank."""

    id: RoundId
    members: Mapping[str, Member]
    formed_at: float = 0.0
    ending: Ending | None = None
    failures: tuple[Failure, ...] = ()
    """In order of arrival."""
    stalled: Mapping[str, Failure] = field(default_factory=dict)
    """The last standstill that each node told of, by boot id, where a hang ends nothing."""
    stalling: tuple[str, ...] = ()
    """Boot ids of those who have told of the present one, until it is known whom to name."""
    stalled_since: float = 0.0
    """When the first of them did."""
    standstill: Failure | None = None
    """The worker to name for the last one."""

    @property
    def world_size(self) -> int:
        return sum(m.local_world_size for m in self.members.values())

    @property
    def size(self) -> int:
        """Nodes that the round was formed of, also those that a successor store did not find."""
        return max(m.assignment.group_world_size for m in self.members.values())


@dataclass(frozen=True)
class LastRound:
    """The last round that is over here, for `only_store`."""

    id: RoundId | None
    size: int
    """Nodes that it was formed of."""
    stopped: frozenset[str]
    """Boot ids of those who said that nothing of it runs any more, and are here."""
    away: frozenset[str] = frozenset()
    """Boot ids of those who said so and are not."""

    @property
    def missing(self) -> int:
        """Nodes of which nobody knows what they run."""
        return self.size - len(self.stopped)

    @property
    def short(self) -> bool:
        """Half or more are missing."""
        return self.missing > 0 and 2 * self.missing >= self.size


NOTHING_BEFORE = LastRound(None, 0, frozenset())
UNKNOWN_PAST = LastRound(None, 1, frozenset())
"""Somebody may run something."""


@dataclass(frozen=True)
class State:
    """Everything a coordinator knows. Times are its own monotonic clock; `epoch` turns them into Unix seconds."""

    attempt: int
    store: int
    facts: Facts
    informed: bool = False
    """Whether an operator has spoken yet."""
    pods: Mapping[int, PodFact] = field(default_factory=dict)
    """`facts.pods` by slot."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    slots: Mapping[int, str] = field(default_factory=dict)
    """Who was the last to announce itself with a slot, by boot id; it may have left `nodes` since."""
    round: Round | None = None
    n: int = 0
    """Number of the last round formed or restored."""
    rounds: int = 0
    last_members: tuple[str, ...] = ()
    """Boot ids of the last round in order of group rank: nodes that stay keep their place."""
    last_call_at: float | None = None
    joiners_since: float | None = None
    recovering_until: float | None = None
    successor: bool = False
    """Whether another store, or another start of this one, was here before."""
    last: LastRound = NOTHING_BEFORE
    """The last one that ran whole."""
    tried: tuple[LastRound, ...] = ()
    """Those since then: not all of their nodes may have heard of them."""
    asked_at: float | None = None
    """When the operator was asked whether this is the only store; None: it is not asked."""
    word_until: float | None = None
    """Until when its answer holds."""
    newer_store: int | None = None
    """A higher incarnation that was heard of: this store is closed."""
    ended: tuple[RoundEnded, ...] = ()
    unfit: Mapping[str, Failure] = field(default_factory=dict)
    """By pod: nodes that asked to be replaced on another machine, also after they have left."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    failure: Failure | None = None
    closed: str = ""
    """Why no round may form any more, by a node's word; empty while one may."""
    epoch: float = 0.0

    @property
    def settings(self) -> Settings:
        return self.facts.settings

    @property
    def charged(self) -> int:
        """Restarts that count: those in status and those it has not taken into account yet."""
        seen = self.facts.charged_round
        return self.facts.charged + sum(e.charged for e in self.ended if seen is None or e.round > seen)


def new_state(
    settings: Settings,
    *,
    attempt: int,
    store: int,
    now: float,
    epoch: float = 0.0,
    recovering: bool = False,
    n: int = 0,
) -> State:
    """A coordinator's state at its start; `recovering` for every store but an execution's first."""
    facts = Facts(lease=-1, sequence=-1, settings=settings, charged=0, charged_round=None)
    until = now + RECOVERY_TIMEOUT if recovering else None
    last = UNKNOWN_PAST if recovering else NOTHING_BEFORE
    return State(attempt, store, facts, n=n, recovering_until=until, successor=recovering, last=last, epoch=epoch)


# ---- events and effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSaid:
    """A message of a node; the first of a connection is its `Announce`."""

    boot: str
    message: FromNode


@dataclass(frozen=True)
class NodeGone:
    """The link of a node closed."""

    boot: str


@dataclass(frozen=True)
class FactsArrived:
    facts: Facts


@dataclass(frozen=True)
class Tick:
    """The deadline that `rounds.deadline` named has come."""


@dataclass(frozen=True)
class NewerStoreHeard:
    """A node that has spoken with a store of a higher incarnation came to this one."""

    incarnation: int


Event: TypeAlias = NodeSaid | NodeGone | FactsArrived | NewerStoreHeard | Tick


@dataclass(frozen=True)
class Send:
    """Tell the node `boot` something; lost if its link is down, which its next `Announce` repairs."""

    boot: str
    message: ToNode


# ---- questions -------------------------------------------------------------------------------------------------


def fact_of(state: State, slot: int) -> PodFact | None:
    """The operator's word on the live pod of a slot."""
    return state.pods.get(slot)


def rival(state: State, node: Node) -> Node | None:
    """Another node that has this one's slot: until the job's end there is one at most."""
    other = state.nodes.get(state.slots.get(node.slot, ""))
    return other if other is not None and other.slot == node.slot and other.boot != node.boot else None


def superseded(state: State, node: Node) -> bool:
    """A newer pod has this node's slot, whatever still runs here."""
    fact = fact_of(state, node.slot)
    return fact is not None and fact.incarnation > node.incarnation


def departing(state: State, node: Node) -> str:
    """Why this node is about to go, by its own word or Kubernetes'; empty while it stays."""
    if node.leaving:
        return node.leaving
    fact = fact_of(state, node.slot)
    if fact is None or fact.incarnation < node.incarnation:
        return ""
    if fact.incarnation > node.incarnation:
        return "a newer pod has its slot"
    return "its pod is being deleted" if fact.state is PodState.DRAINING else ""


def candidates(state: State) -> list[Node]:
    """Nodes that could be in a round that forms now."""
    return [n for n in state.nodes.values() if _eligible(state, n)]


def _eligible(state: State, node: Node) -> bool:
    if node.gone_at is not None or node.stale is not None or departing(state, node):
        return False
    return not state.informed or fact_of(state, node.slot) is not None


def awaited(state: State, *, ready: bool) -> Iterator[PodFact]:
    """Pods that the job wants, that should come and have not announced themselves (with `ready`: or are not warm)."""
    here = {(n.slot, n.incarnation) for n in state.nodes.values() if n.gone_at is None and (n.ready or not ready)}
    for pod in state.facts.pods:
        coming = pod.state in (PodState.STARTING, PodState.RUNNING)
        if coming and pod.slot < state.settings.slots and (pod.slot, pod.incarnation) not in here:
            yield pod


def set_node(state: State, node: Node) -> State:
    slots = state.slots if state.slots.get(node.slot) == node.boot else put(state.slots, node.slot, node.boot)
    return replace(state, nodes=put(state.nodes, node.boot, node), slots=slots)


def set_member(round_: Round, boot: str, member: Member) -> Round:
    return replace(round_, members=put(round_.members, boot, member))

"""What a coordinator knows, as frozen data, and the questions its rules ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from elasticjob.contract.messages import (
    CoordinatorToNode,
    EndReason,
    ExpectedPod,
    Failure,
    LastMembership,
    MemberState,
    NodeToCoordinator,
    OperatorView,
    Outcome,
    PodState,
    RoundEnded,
    RoundSettings,
    StartRound,
)
from elasticjob.contract.names import RoundId
from elasticjob.rendezvous.persistent_map import with_item

RECONNECT_GRACE = 0.25
"""Seconds that a node whose link closed has to come back: a blip is not a death."""
RECOVERY_TIMEOUT = 10.0
"""Seconds from the first node's announcement that a successor store waits for the others of a round."""
LOST_TIMEOUT = 1.0
"""The same for those whose node is lost: all lost their store together, and look for another once a second."""
STOP_TIMEOUT = 30.0
"""Seconds beyond the stop grace after which a member that does not report its workers' end counts as lost."""


@dataclass(frozen=True)
class Node:
    """A node that has announced itself; known by its agent id."""

    agent_id: str
    index: int
    incarnation: int
    pod: str
    address: str
    store_port: int
    local_world_size: int
    role: str
    ready: bool = False
    leaving: str = ""
    """Why it was told to go; empty while it stays."""
    disconnected_at: float | None = None
    """When its link closed; None while it is up."""
    stale_round: RoundId | None = None
    """A round of the past whose workers may still run there: they must stop before it may join."""
    membership: LastMembership | None = None
    """What became of its last round; kept and read only while recovering."""
    failure: Failure | None = None
    """Its failure in that round, if it told one while recovering."""
    fork_disabled_reason: str = ""
    """Why its workers start by exec, if they do and nobody asked for it."""

    def expired(self, now: float) -> bool:
        return self.disconnected_at is not None and now >= self.disconnected_at + RECONNECT_GRACE


@dataclass(frozen=True)
class Member:
    """A node's part in the current round."""

    assignment: StartRound
    pod: str
    local_world_size: int
    state: MemberState = MemberState.STARTING
    lost: bool = False

    @property
    def accounted_for(self) -> bool:
        """Nothing of the round can still run there, as far as anybody can know."""
        return self.lost or self.state is MemberState.STOPPED


@dataclass(frozen=True)
class PlannedStop:
    """Where a round is to stop; `last_step` is None while members are asked for theirs (see `planned`)."""

    steps: Mapping[str, int | None] = field(default_factory=dict)
    """What members answered, by agent id."""
    last_step: int | None = None


@dataclass(frozen=True)
class RoundEnding:
    """A round that is being stopped: at once, or on a plan."""

    reason: EndReason
    message: str
    since: float
    planned: bool = False
    planned_stop: PlannedStop | None = None
    """None once members are told to stop at once."""


@dataclass(frozen=True)
class Round:
    """The current round; `members` by agent id in order of group rank."""

    id: RoundId
    members: Mapping[str, Member]
    formed_at: float = 0.0
    ending: RoundEnding | None = None
    failures: tuple[Failure, ...] = ()
    """In order of arrival."""
    stall_reports: Mapping[str, Failure] = field(default_factory=dict)
    """The last standstill that each node told of, by agent id, where a hang ends nothing."""
    stall_pending: tuple[str, ...] = ()
    """Boot ids of those who have told of the present one, until it is known whom to name."""
    stall_since: float = 0.0
    """When the first of them did."""
    stall: Failure | None = None
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
    stopped_disconnected: frozenset[str] = frozenset()
    """Boot ids of those who said so and are not."""

    @property
    def missing(self) -> int:
        """Nodes of which nobody knows what they run."""
        return self.size - len(self.stopped)

    @property
    def half_missing(self) -> bool:
        """Half or more are missing."""
        return self.missing > 0 and 2 * self.missing >= self.size


NO_LAST_ROUND = LastRound(None, 0, frozenset())
UNKNOWN_LAST_ROUND = LastRound(None, 1, frozenset())
"""Somebody may run something."""


@dataclass(frozen=True)
class CoordinatorState:
    """Everything a coordinator knows. Times are its own monotonic clock; `epoch` turns them into Unix seconds."""

    attempt: int
    store_incarnation: int
    operator_view: OperatorView
    operator_seen: bool = False
    """Whether an operator has spoken yet."""
    pods: Mapping[int, ExpectedPod] = field(default_factory=dict)
    """`facts.pods` by index."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    agent_ids: Mapping[int, str] = field(default_factory=dict)
    """Who was the last to announce itself with a index, by agent id; it may have left `nodes` since."""
    round: Round | None = None
    round_number: int = 0
    """Number of the last round formed or restored."""
    rounds: int = 0
    last_members: tuple[str, ...] = ()
    """Boot ids of the last round in order of group rank: nodes that stay keep their place."""
    last_call_at: float | None = None
    joiners_since: float | None = None
    recovering_until: float | None = None
    successor: bool = False
    """Whether another store, or another start of this one, was here before."""
    last_round: LastRound = NO_LAST_ROUND
    """The last one that ran whole."""
    attempted_rounds: tuple[LastRound, ...] = ()
    """Those since then: not all of their nodes may have heard of them."""
    confirmation_requested_at: float | None = None
    """When the operator was asked whether this is the only store; None: it is not asked."""
    confirmed_until: float | None = None
    """Until when its answer holds."""
    newer_store: int | None = None
    """A higher incarnation that was heard of: this store is closed."""
    ended_rounds: tuple[RoundEnded, ...] = ()
    unhealthy: Mapping[str, Failure] = field(default_factory=dict)
    """By pod: nodes that asked to be replaced on another machine, also after they have left."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    failure: Failure | None = None
    closed_reason: str = ""
    """Why no round may form any more, by a node's word; empty while one may."""
    epoch: float = 0.0

    @property
    def settings(self) -> RoundSettings:
        return self.operator_view.settings

    @property
    def charged(self) -> int:
        """Restarts that count: those in status and those it has not taken into account yet."""
        seen = self.operator_view.charged_round
        return self.operator_view.charged + sum(e.charged for e in self.ended_rounds if seen is None or e.round > seen)


def initial_state(
    settings: RoundSettings,
    *,
    attempt: int,
    store: int,
    now: float,
    epoch: float = 0.0,
    recovering: bool = False,
    n: int = 0,
) -> CoordinatorState:
    """A coordinator's state at its start; `recovering` for every store but an execution's first."""
    facts = OperatorView(lease=-1, sequence=-1, settings=settings, charged=0, charged_round=None)
    until = now + RECOVERY_TIMEOUT if recovering else None
    last = UNKNOWN_LAST_ROUND if recovering else NO_LAST_ROUND
    return CoordinatorState(
        attempt,
        store,
        facts,
        round_number=n,
        recovering_until=until,
        successor=recovering,
        last_round=last,
        epoch=epoch,
    )


# ---- events and effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeMessage:
    """A message of a node; the first of a connection is its `Announce`."""

    agent_id: str
    message: NodeToCoordinator


@dataclass(frozen=True)
class NodeDisconnected:
    """The link of a node closed."""

    agent_id: str


@dataclass(frozen=True)
class OperatorViewReceived:
    view: OperatorView


@dataclass(frozen=True)
class Tick:
    """The deadline that `rounds.deadline` named has come."""


@dataclass(frozen=True)
class NewerStoreSeen:
    """A node that has spoken with a store of a higher incarnation came to this one."""

    incarnation: int


CoordinatorEvent: TypeAlias = NodeMessage | NodeDisconnected | OperatorViewReceived | NewerStoreSeen | Tick


@dataclass(frozen=True)
class SendToNode:
    """Tell the node `agent_id` something; lost if its link is down, which its next `Announce` repairs."""

    agent_id: str
    message: CoordinatorToNode


# ---- questions -------------------------------------------------------------------------------------------------


def expected_pod(state: CoordinatorState, index: int) -> ExpectedPod | None:
    """The operator's word on the live pod of a index."""
    return state.pods.get(index)


def node_with_same_index(state: CoordinatorState, node: Node) -> Node | None:
    """Another node that has this one's index: until the job's end there is one at most."""
    other = state.nodes.get(state.agent_ids.get(node.index, ""))
    return other if other is not None and other.index == node.index and other.agent_id != node.agent_id else None


def superseded(state: CoordinatorState, node: Node) -> bool:
    """A newer pod has this node's index, whatever still runs here."""
    fact = expected_pod(state, node.index)
    return fact is not None and fact.incarnation > node.incarnation


def departure_reason(state: CoordinatorState, node: Node) -> str:
    """Why this node is about to go, by its own word or Kubernetes'; empty while it stays."""
    if node.leaving:
        return node.leaving
    fact = expected_pod(state, node.index)
    if fact is None or fact.incarnation < node.incarnation:
        return ""
    if fact.incarnation > node.incarnation:
        return "a newer pod has its index"
    return "its pod is being deleted" if fact.state is PodState.DRAINING else ""


def candidates(state: CoordinatorState) -> list[Node]:
    """Nodes that could be in a round that forms now."""
    return [n for n in state.nodes.values() if _eligible(state, n)]


def _eligible(state: CoordinatorState, node: Node) -> bool:
    if node.disconnected_at is not None or node.stale_round is not None or departure_reason(state, node):
        return False
    return not state.operator_seen or expected_pod(state, node.index) is not None


def missing_pods(state: CoordinatorState, *, ready: bool) -> Iterator[ExpectedPod]:
    """Pods that the job wants, that should come and have not announced themselves (with `ready`: or are not warm)."""
    here = {
        (n.index, n.incarnation) for n in state.nodes.values() if n.disconnected_at is None and (n.ready or not ready)
    }
    for pod in state.operator_view.pods:
        coming = pod.state in (PodState.STARTING, PodState.RUNNING)
        if coming and pod.index < state.settings.desired_pods and (pod.index, pod.incarnation) not in here:
            yield pod


def set_node(state: CoordinatorState, node: Node) -> CoordinatorState:
    indices = (
        state.agent_ids
        if state.agent_ids.get(node.index) == node.agent_id
        else with_item(state.agent_ids, node.index, node.agent_id)
    )
    return replace(state, nodes=with_item(state.nodes, node.agent_id, node), agent_ids=indices)


def set_member(round_: Round, agent_id: str, member: Member) -> Round:
    return replace(round_, members=with_item(round_.members, agent_id, member))

"""The state of a coordinator, its events and its effects, as frozen data, and queries that several rules share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from elasticjob._runtime.contract.failures.restart_window import RestartWindow
from elasticjob._runtime.contract.messages import (
    NO_NEW_PROCESSES,
    CoordinatorToNode,
    EndReason,
    ExpectedPod,
    Failure,
    LastMembership,
    MemberState,
    NewProcesses,
    NodeToCoordinator,
    OperatorView,
    Outcome,
    PodState,
    RoundEnded,
    RoundSettings,
    StartRound,
    StoreToNode,
)
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.rendezvous.persistent_map import with_item

RECONNECT_GRACE = 0.25
"""Seconds that a node has to reconnect after its link closed, before it counts as lost."""
RECOVERY_TIMEOUT = 10.0
"""Seconds that a successor store waits for the nodes of a round, from the first node's announcement."""
LOST_TIMEOUT = 1.0
"""The same for pods on a lost Kubernetes node. Agents that lose their store try to reconnect once a second."""
TAKEOVER_TIMEOUT = 1.0
"""Seconds without an announcement after which a standby store that has taken over waits no longer. The nodes lose the
old store together; where only keep-alive notices it, within one interval of the probes."""
BREAK_TIMEOUT = 10.0
"""Seconds beyond the grace period after which a member that still counts steps is lost, if others wait for that. Its
agent has killed its workers by then."""
STOP_TIMEOUT = 30.0
"""Seconds beyond the grace period after which a member that has not reported its workers stopped counts as lost."""

MAX_ENDED_ROUNDS = 256
"""Ended rounds that wait for an operator. Without a limit every report of a job that has none would grow."""


@dataclass(frozen=True)
class Node:
    """A node that has announced itself, identified by its agent id."""

    agent_id: str
    index: int
    incarnation: int
    pod: str
    address: str
    store_port: int
    local_world_size: int
    role: str
    ready: bool = False
    leaving_reason: str = ""
    """Why the node asked to leave; empty while it stays."""
    disconnected_at: float | None = None
    """When its link closed; None while it is connected."""
    stale_round: RoundId | None = None
    """An earlier round whose workers may still run on the node. They must stop before the node may join a round."""
    unresponsive: bool = False
    """Whether the node is connected, but has not stopped the workers of `stale_round` in time."""
    membership: LastMembership | None = None
    """The last round that the node had been in when it announced itself, and its state there at that time. During
    recovery the state follows the node's messages."""
    fork_disabled_reason: str = ""
    """Why its workers start by exec although the user did not ask for that; empty if they are forked."""
    store_vanished: bool = False
    """Whether the machine of the store that it was connected to before is down or cut off."""
    restartable: bool = False
    """Whether it has reported that its workers' function can be called again."""
    hang_guard: str = ""
    """What ends a hang of its workers in place of torch's time-out; empty if that is not so."""
    knows_machine_end: bool = False
    """Whether it had been sent the end of its machine when it announced itself."""
    has_state: bool = False
    """Whether it may have a training state, as far as it has reported."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """What it has to start for its next round, as it has reported; the count is 0 once it starts that ahead."""
    results_ended: RoundId | None = None
    """The round of which its workers count no step any more, and wait for `BreakRound`."""
    ended_in_time: RoundId | None = None
    """The last round of which it said so as a member that was not lost: no other node had broken its collectives."""

    def expired(self, now: float) -> bool:
        """Return whether the node has been disconnected for longer than the grace."""
        return self.disconnected_at is not None and now >= self.disconnected_at + RECONNECT_GRACE


@dataclass(frozen=True)
class Member:
    """A node's part in the current round."""

    assignment: StartRound
    pod: str
    local_world_size: int
    state: MemberState = MemberState.STARTING
    lost: bool = False
    unresponsive: bool = False
    """Whether it was connected when it was lost: it did not stop its workers in time, so they may still run."""

    @property
    def accounted_for(self) -> bool:
        """Whether no worker of the round runs there any more, to this coordinator's knowledge."""
        return self.lost or self.state is MemberState.STOPPED


@dataclass(frozen=True)
class PlannedStop:
    """The negotiation of a planned end (see `planned_end`)."""

    steps: Mapping[str, int | None] = field(default_factory=dict)
    """The step that each member reported, by agent id."""
    last_step: int | None = None
    """The step after which all workers stop; None until all members have reported."""


@dataclass(frozen=True)
class RoundEnding:
    """Why and since when a round is being stopped."""

    reason: EndReason
    message: str
    since: float
    planned: bool = False
    """Whether the end was begun as a planned one."""
    planned_stop: PlannedStop | None = None
    """None if the members stop at once, from the start or after the plan has failed."""
    kill_at: float = 0.0
    """When the grace period of workers that get SIGTERM is over."""


@dataclass(frozen=True)
class Round:
    """The current round."""

    id: RoundId
    members: Mapping[str, Member]
    """By agent id, in order of group rank."""
    formed_at: float = 0.0
    """Unix seconds at which all workers had started; 0 before."""
    ending: RoundEnding | None = None
    failures: tuple[Failure, ...] = ()
    """In order of arrival."""
    ended_ranks: tuple[tuple[int, ...], ...] = ()
    """The ranks that had succeeded before the round ended, of each member that has reported some."""
    stall_reports: Mapping[str, Failure] = field(default_factory=dict)
    """The last stall that each node reported, by agent id. Used where a hang does not end the round."""
    stall_pending: tuple[str, ...] = ()
    """Agent ids of the nodes that have reported the present stall; empty once its cause is found."""
    stall_since: float = 0.0
    """When the first of them reported it."""
    stall: Failure | None = None
    """The worker to blame for the last stall."""

    @property
    def world_size(self) -> int:
        return sum(m.local_world_size for m in self.members.values())

    @property
    def size(self) -> int:
        """The number of nodes that the round started with, including those that a successor store did not find."""
        return max(m.assignment.group_world_size for m in self.members.values())


@dataclass(frozen=True)
class RestartDelay:
    """Since when, and after which restart, no round starts (see `restart_delay`)."""

    since: float
    restarts: int
    """Restarts that counted then; 1 or more."""


@dataclass(frozen=True)
class LastRound:
    """What this store knows of a round that is over (see `confirmation`)."""

    id: RoundId | None
    """None if there was none, or if it is unknown."""
    size: int
    """The number of nodes that the round started with."""
    stopped: frozenset[str]
    """Agent ids of the connected nodes that reported their workers of the round stopped."""
    stopped_disconnected: frozenset[str] = frozenset()
    """Agent ids of the nodes that reported the same and have disconnected since."""
    pods: Mapping[str, str] = field(default_factory=dict)
    """By agent id: the pods of its nodes, as far as this store knows them."""
    unresponsive: frozenset[str] = frozenset()
    """Agent ids of the members that were connected and did not stop their workers in time."""

    @property
    def missing(self) -> int:
        """The number of nodes that may still run workers."""
        return self.size - len(self.stopped)

    @property
    def lacks_majority(self) -> bool:
        """Whether half of its members or more are missing, so that those which are here are not more than half.

        The missing ones may then go on with another store. Compare `confirmation.exactly_half_missing_round`.
        """
        return self.missing > 0 and 2 * self.missing >= self.size


NO_LAST_ROUND = LastRound(None, 0, frozenset())
"""There was no earlier round."""
UNKNOWN_LAST_ROUND = LastRound(None, 1, frozenset())
"""Unknown history: an older round may still be running."""


@dataclass(frozen=True)
class CoordinatorState:
    """Everything that a coordinator knows.

    Times are seconds of its own monotonic clock; `epoch` is the Unix time of that clock's zero.
    """

    attempt: int
    store_incarnation: int
    operator_view: OperatorView
    operator_seen: bool = False
    """Whether an operator has sent its view to this store."""
    pods: Mapping[int, ExpectedPod] = field(default_factory=dict)
    """`operator_view.pods` by index."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """By agent id."""
    agent_ids: Mapping[int, str] = field(default_factory=dict)
    """By index: the agent id that announced itself last. Its node may have been removed from `nodes` since."""
    round: Round | None = None
    round_number: int = 0
    """Number of the last round that this store started or restored."""
    rounds: int = 0
    """How many rounds this store has started or restored."""
    last_members: tuple[str, ...] = ()
    """Agent ids of the last round in order of group rank: nodes that stay keep their order."""
    last_call_at: float | None = None
    """When the last call ends; None while there is none."""
    shortest_stop: float | None = None
    """Seconds in which the workers of a round have stopped, the least of all rounds that this store has ended; None
    before the first."""
    restart_delay: RestartDelay | None = None
    """Keeps the next round from starting; None while nothing does."""
    joiners_since: float | None = None
    """Since when ready nodes have waited to join the running round; None while none waits."""
    recovering_until: float | None = None
    """When recovery ends at the latest; None once it is over."""
    recovery_failures: Mapping[RoundId, tuple[Failure, ...]] = field(default_factory=dict)
    """By round: the failures that nodes reported during recovery, in order of arrival. Empty once it is over."""
    passive: bool = False
    """Whether this is a standby store that has not taken over: it decides nothing."""
    retired: bool = False
    """Whether this passive standby store never takes over, because the operator demanded it."""
    restarted: bool = False
    """Whether this standby store may have been active before: its container restarted. Only the operator activates
    it then, and it confirms no retirement."""
    known_round: RoundId | None = None
    """The newest round that an operator has named in a view (`OperatorView.newest_round`)."""
    took_over: bool = False
    """Whether this store was a standby store and has become active."""
    announced_at: float = 0.0
    """When the last node announced itself, or the store took over. Set during the recovery of a standby store only."""
    successor: bool = False
    """Whether another store of the job, or an earlier process of this one, ran before."""
    last_round: LastRound = NO_LAST_ROUND
    """The last round whose workers all started."""
    attempted_rounds: tuple[LastRound, ...] = ()
    """Later rounds whose workers did not all start: some of their nodes may not have received their assignment."""
    confirmation_requested_at: float | None = None
    """When this store asked the operator to confirm that it is the only one; None if no request is open."""
    confirmed_until: float | None = None
    """Until when the operator's confirmation holds; None without one."""
    confirmed_half: bool = False
    """Whether the confirmation holds only while no more than half of the last round's nodes are missing."""
    newer_store: int | None = None
    """A higher incarnation of the store, if a node has connected to one: this store is closed. Else None."""
    ended_rounds: tuple[RoundEnded, ...] = ()
    """Rounds that ended and that the operator has not acknowledged yet, the oldest first; at most MAX_ENDED_ROUNDS."""
    forgotten_charges: int = 0
    """Charged restarts of rounds that `ended_rounds` had no place for."""
    machine_ends: Mapping[str, float] = field(default_factory=dict)
    """By pod name: when the pod's machine ends, as far as that is announced (see `machine_ends`)."""
    unhealthy: Mapping[str, Failure] = field(default_factory=dict)
    """By pod name: why the node asked for a replacement on another machine. Kept after the node has left."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """By pod name: why the pod is replaced after a failure (restartStrategy Recreate, or a rule). Kept after the node
    has left: one whose link closes just then announces itself again."""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    failure: Failure | None = None
    """The root cause of a FAILED outcome."""
    closed_reason: str = ""
    """Why no further round may start, as a node asked (torch's `set_closed`); empty while rounds may start."""
    epoch: float = 0.0

    @property
    def settings(self) -> RoundSettings:
        return self.operator_view.settings

    def is_outdated(self, round_id: RoundId) -> bool:
        """Return whether the operator knows a newer round: this one need not be the last."""
        return self.known_round is not None and round_id < self.known_round

    @property
    def charged(self) -> int:
        """Restarts charged to the budget: those in status, and those that status does not contain yet."""
        return self._restarts.count

    def charged_at(self, time: float) -> int:
        """Return the restarts that count if a failure happens at this time, Unix seconds."""
        return self._restarts.at(time, self.settings.restart_window).count

    @property
    def _restarts(self) -> RestartWindow:
        view = self.operator_view
        restarts = RestartWindow(view.charged + self.forgotten_charges, view.charged_since)
        for ended in self.ended_rounds:
            if ended.charged and not self.is_counted(ended.round):
                restarts = restarts.with_restart(ended.time, self.settings.restart_window)
        return restarts

    def is_counted(self, round_id: RoundId) -> bool:
        """Return whether status accounts for this round already."""
        view = self.operator_view
        return round_id in view.charged_rounds or (view.charged_round is not None and round_id <= view.charged_round)


def initial_state(
    settings: RoundSettings,
    *,
    attempt: int,
    store: int,
    now: float,
    epoch: float = 0.0,
    recovering: bool = False,
    round_number: int = 0,
    standby: bool = False,
    restarted: bool = False,
) -> CoordinatorState:
    """Return the state of a coordinator that starts.

    `recovering` is true for every store but the first of an attempt. The first round gets number `round_number` + 1.
    `standby`: the store is a passive standby store; `restarted`: an earlier process of it ran before.
    """
    return CoordinatorState(
        attempt,
        store,
        OperatorView(lease=-1, sequence=-1, settings=settings, charged=0, charged_round=None),
        round_number=round_number,
        recovering_until=now + RECOVERY_TIMEOUT if recovering or standby else None,
        passive=standby,
        restarted=standby and restarted,
        successor=recovering or standby,
        last_round=UNKNOWN_LAST_ROUND if recovering or standby else NO_LAST_ROUND,
        epoch=epoch,
    )


# ---- events and effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeMessage:
    """A node sent a message. The first one of a connection is its `Announce`."""

    agent_id: str
    message: NodeToCoordinator


@dataclass(frozen=True)
class NodeDisconnected:
    """The link of a node closed."""

    agent_id: str


@dataclass(frozen=True)
class OperatorViewReceived:
    """The operator sent its view."""

    view: OperatorView


@dataclass(frozen=True)
class Tick:
    """The time that `rounds.next_deadline` returned has come."""


@dataclass(frozen=True)
class NewerStoreSeen:
    """A node reported that it has connected to a store of a higher incarnation."""

    incarnation: int


CoordinatorEvent: TypeAlias = NodeMessage | NodeDisconnected | OperatorViewReceived | NewerStoreSeen | Tick


@dataclass(frozen=True)
class SendToNode:
    """Send a message to a node. If its link is down, the answer to its next `Announce` makes up for the message."""

    agent_id: str
    message: CoordinatorToNode | StoreToNode


# ---- queries ---------------------------------------------------------------------------------------------------


def expected_pod(state: CoordinatorState, index: int) -> ExpectedPod | None:
    """Return the live pod of an index as the operator sees it; None if it has none."""
    return state.pods.get(index)


def topology_of(state: CoordinatorState, node: Node) -> tuple[str, ...]:
    """Return where the node's machine is (`ExpectedPod.topology`); empty if the operator has not sent it."""
    pod = expected_pod(state, node.index)
    return pod.topology if pod is not None and pod.incarnation == node.incarnation else ()


def node_with_same_index(state: CoordinatorState, node: Node) -> Node | None:
    """Return the other node that has this node's index, if any: the newest one.

    Until the job has ended there is at most one, besides those whose pods were replaced while their workers still ran.
    """
    other = state.nodes.get(state.agent_ids.get(node.index, ""))
    return other if other is not None and other.index == node.index and other.agent_id != node.agent_id else None


def superseded(state: CoordinatorState, node: Node) -> bool:
    """Return whether a newer pod has this node's index: the operator lists it, or it has announced itself."""
    pod, other = expected_pod(state, node.index), node_with_same_index(state, node)
    announced = other is not None and other.incarnation > node.incarnation
    return announced or (pod is not None and pod.incarnation > node.incarnation)


def departure_reason(state: CoordinatorState, node: Node) -> str:
    """Return why this node is leaving, as it reported itself or as the operator sees its pod; empty while it stays."""
    if node.leaving_reason:
        return node.leaving_reason
    if node.pod in state.replaced:
        return state.replaced[node.pod]
    if superseded(state, node):
        return "a newer pod has its index"
    pod = expected_pod(state, node.index)
    draining = pod is not None and pod.incarnation == node.incarnation and pod.state is PodState.DRAINING
    return "its pod is being deleted" if draining else ""


def is_restartable(state: CoordinatorState) -> bool:
    """Return whether the function of this job can be called again in the same process: all nodes run one script."""
    return any(n.restartable for n in state.nodes.values())


def has_ended_results(state: CoordinatorState, agent_id: str) -> bool:
    """Return whether a member of the round has said that its workers count no step of it any more."""
    node = state.nodes.get(agent_id)
    return node is not None and state.round is not None and node.results_ended == state.round.id


def waits_to_break(state: CoordinatorState) -> bool:
    """Return whether a member of the round waits until no other one counts steps."""
    return state.round is not None and any(has_ended_results(state, agent_id) for agent_id in state.round.members)


def candidates(state: CoordinatorState) -> list[Node]:
    """Return the nodes that may be in a round that starts now."""
    return [n for n in state.nodes.values() if _eligible(state, n)]


def _eligible(state: CoordinatorState, node: Node) -> bool:
    if node.disconnected_at is not None or node.stale_round is not None or departure_reason(state, node):
        return False
    return not state.operator_seen or expected_pod(state, node.index) is not None


def missing_pods(state: CoordinatorState, *, ready: bool) -> Iterator[ExpectedPod]:
    """Yield the expected pods that are not connected; with `ready`, also those whose node is not ready."""
    present = {
        (n.index, n.incarnation) for n in state.nodes.values() if n.disconnected_at is None and (n.ready or not ready)
    }
    for pod in state.operator_view.pods:
        expected = pod.state in (PodState.STARTING, PodState.RUNNING)
        if expected and pod.index < state.settings.desired_pods and (pod.index, pod.incarnation) not in present:
            yield pod


def set_node(state: CoordinatorState, node: Node) -> CoordinatorState:
    """Return the state with this node added or replaced. Its index stays that of a newer node, if there is one."""
    other = node_with_same_index(state, node)
    known = state.agent_ids.get(node.index) == node.agent_id or (other and other.incarnation > node.incarnation)
    agent_ids = state.agent_ids if known else with_item(state.agent_ids, node.index, node.agent_id)
    return replace(state, nodes=with_item(state.nodes, node.agent_id, node), agent_ids=agent_ids)


def add_ended_round(state: CoordinatorState, ended: RoundEnded) -> CoordinatorState:
    """Return the state with one more ended round. If there are too many, the oldest that was not charged is dropped."""
    kept = (*state.ended_rounds, ended)
    if len(kept) <= MAX_ENDED_ROUNDS:
        return replace(state, ended_rounds=kept)
    drop = next((n for n, e in enumerate(kept) if not e.charged), 0)
    forgotten = state.forgotten_charges + kept[drop].charged
    return replace(state, ended_rounds=(*kept[:drop], *kept[drop + 1 :]), forgotten_charges=forgotten)


def set_member(round_: Round, agent_id: str, member: Member) -> Round:
    """Return the round with this member replaced."""
    return replace(round_, members=with_item(round_.members, agent_id, member))

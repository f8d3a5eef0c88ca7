"""The state of a coordinator, its events and its effects, as frozen data, and queries that several rules share."""

from __future__ import annotations

from elasticjob._runtime.rendezvous.state.agents import Node
from elasticjob._runtime.rendezvous.state.coordinator_state import (
    MAX_ENDED_ROUNDS,
    CoordinatorState,
    add_ended_round,
    initial_state,
)
from elasticjob._runtime.rendezvous.state.events import (
    CoordinatorEvent,
    NewerStoreSeen,
    NodeDisconnected,
    NodeMessage,
    OperatorViewReceived,
    SendToNode,
    Tick,
)
from elasticjob._runtime.rendezvous.state.queries import (
    candidates,
    departure_reason,
    expected_pod,
    has_ended_results,
    is_restartable,
    missing_pods,
    node_with_same_index,
    set_node,
    superseded,
    topology_of,
    waits_to_break,
)
from elasticjob._runtime.rendezvous.state.round import (
    NO_LAST_ROUND,
    UNKNOWN_LAST_ROUND,
    LastRound,
    Member,
    PlannedStop,
    RestartDelay,
    Round,
    RoundEnding,
    set_member,
)
from elasticjob._runtime.rendezvous.state.time_limits import (
    BREAK_TIMEOUT,
    LOST_TIMEOUT,
    RECONNECT_GRACE,
    RECOVERY_TIMEOUT,
    STOP_TIMEOUT,
    TAKEOVER_TIMEOUT,
)

__all__ = [
    "BREAK_TIMEOUT",
    "LOST_TIMEOUT",
    "MAX_ENDED_ROUNDS",
    "NO_LAST_ROUND",
    "RECONNECT_GRACE",
    "RECOVERY_TIMEOUT",
    "STOP_TIMEOUT",
    "TAKEOVER_TIMEOUT",
    "UNKNOWN_LAST_ROUND",
    "CoordinatorEvent",
    "CoordinatorState",
    "LastRound",
    "Member",
    "NewerStoreSeen",
    "Node",
    "NodeDisconnected",
    "NodeMessage",
    "OperatorViewReceived",
    "PlannedStop",
    "RestartDelay",
    "Round",
    "RoundEnding",
    "SendToNode",
    "Tick",
    "add_ended_round",
    "candidates",
    "departure_reason",
    "expected_pod",
    "has_ended_results",
    "initial_state",
    "is_restartable",
    "missing_pods",
    "node_with_same_index",
    "set_member",
    "set_node",
    "superseded",
    "topology_of",
    "waits_to_break",
]

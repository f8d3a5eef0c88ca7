"""Whether the operator may replace an unresponsive store, or suspects its own network.

An operator that has lost its links to the stores of many nodes at once is more likely cut off than they are. It then
goes by what the kubelets report, and replaces a few stores at a time.
"""

from __future__ import annotations

from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import ReachedStores

MANY_NODES = 3
"""Nodes whose stores do not respond: from this number on, the operator suspects itself, however many stores it
reaches."""
REPLACED_AT_ONCE = 3
"""Stores that an operator which suspects itself replaces within `ReachedStores.replaced`'s time."""


def suspects_itself(reach: ReachedStores) -> bool:
    """Return whether the operator's own network may be why stores do not respond. Stores on one node are one sign."""
    return reach.lost_nodes >= MANY_NODES or (reach.lost_nodes > 1 and reach.lost_nodes > reach.reached_nodes)


def may_replace(reach: ReachedStores, *, kubelet_late: bool) -> bool:
    """Return whether the operator may replace a store that it does not reach. `kubelet_late`: nor does its kubelet
    renew its lease."""
    return not suspects_itself(reach) or (kubelet_late and reach.replaced < REPLACED_AT_ONCE)


def describe_unreachable(reach: ReachedStores, store: Pod, *, since: float, kubelet_late: bool) -> str:
    """Return what the operator cannot see of a store that it does not replace. `since`: Unix seconds."""
    kubelet = (
        f"the kubelet of {store.node} does not renew its lease either, and the operator replaces a few stores at a time"
        if kubelet_late
        else f"the kubelet of {store.node} reports {store.name} as ready, so the operator does not replace it"
    )
    return (
        f"the operator has not reached the store since {timestamp(since)}, nor the stores on "
        f"{with_noun(reach.lost_nodes - 1, 'other Node')}: its own network may be the cause; {kubelet}. The counts in "
        "status are of that time, and failures and restarts since then are unknown to the operator. Training and "
        "restarts continue without it"
    )

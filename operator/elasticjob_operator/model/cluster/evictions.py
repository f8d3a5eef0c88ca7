"""Evictions of Kubernetes 1.37 (`lifecycle.k8s.io`, alpha): each asks the responders of one pod in turn to end it.

Clients write EvictionRequests. A controller makes one Eviction of all requests about a pod, and activates the pod's
responders one after the other. The active one reports a heartbeat until it is done. If it is silent for 20 minutes, or
done while the pod still runs, the next one has its turn. The last one is Kubernetes' own, which evicts the pod as
`kubectl drain` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_operator.model.cluster.raw import Raw, moment, objects, text

RESPONDER = "elasticjob.dev/elasticjob-controller"
"""The operator's name as a responder."""
RESPONDER_PRIORITY = 10000
"""What the API asks the controller of a pod to take. Responders with a higher priority come before it."""


@dataclass(frozen=True)
class Eviction:
    """An Eviction of a pod that has the operator as a responder."""

    name: str
    uid: str
    pod: str
    pod_uid: str
    requesters: tuple[str, ...] = ()
    """Who asks for it, and has not withdrawn that."""
    active: bool = True
    """Whether it is the operator's turn, it has a report to write and is not done, and somebody still asks for it."""
    heartbeat: float = 0.0
    """The operator's last report, Unix seconds; 0: it has not reported yet."""
    raw: Raw = field(default_factory=dict, compare=False, repr=False)
    """The whole object, for the next report."""


def parse_eviction(raw: Raw) -> Eviction | None:
    """Return the Eviction; None if it is of no pod, or its pod has not the operator as a responder."""
    turns = {text(turn, "name"): text(turn, "state") for turn in objects(raw, "status", "targetResponders")}
    pod_uid = text(raw, "spec", "target", "pod", "uid")
    if RESPONDER not in turns or not pod_uid:
        return None
    own = own_report(raw)
    asking = (r for r in objects(raw, "status", "requesters") if text(r, "intent") == "Eviction")
    requesters = tuple(text(requester, "name") for requester in asking)
    return Eviction(
        name=text(raw, "metadata", "name"),
        uid=text(raw, "metadata", "uid"),
        pod=text(raw, "spec", "target", "pod", "name"),
        pod_uid=pod_uid,
        requesters=requesters,
        active=turns[RESPONDER] == "Active" and bool(own and requesters) and "completionTime" not in own,
        heartbeat=moment(own, "heartbeatTime") or 0.0,
        raw=raw,
    )


def own_report(raw: Raw) -> Raw:
    """Return what the operator reports in an Eviction; empty if the controller has not prepared that yet."""
    return next((report for report in objects(raw, "status", "responders") if text(report, "name") == RESPONDER), {})

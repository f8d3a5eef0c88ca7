"""Where the scheduler prefers to place a job's worker pods (`spec.placement`)."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.model.job.spec import Placement
from elasticjob_operator.model.observed import Job

HOSTNAME = "kubernetes.io/hostname"
"""The label of a Node that no other one shares."""
_SOFT = "ScheduleAnyway"


def prefer_placement(pod: dict[str, Any], job: Job, placement: Placement, label: str) -> None:
    """Ask for nodes with one value of this label, or with many, in place. A template that says itself where pods are
    in relation to others stays as it is."""
    affinity = pod.get("affinity") or {}
    own_rules = (pod.get("topologySpreadConstraints"), affinity.get("podAffinity"), affinity.get("podAntiAffinity"))
    if placement is Placement.NONE or any(own_rules):
        return
    workers = {"matchLabels": {Label.JOB_UID: job.uid, Label.ROLE: Role.WORKER.value}}
    spread = {"maxSkew": 1, "topologyKey": label, "whenUnsatisfiable": _SOFT}
    if placement is Placement.SPREAD:
        pod["topologySpreadConstraints"] = [{**spread, "labelSelector": workers}]
        return
    # Without constraints, the scheduler spreads the pods of a Service over nodes. This one selects no pods.
    pod["topologySpreadConstraints"] = [spread]
    term = {"weight": 100, "podAffinityTerm": {"topologyKey": label, "labelSelector": workers}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [term]}
    pod["affinity"] = {**affinity, "podAffinity": preferred}

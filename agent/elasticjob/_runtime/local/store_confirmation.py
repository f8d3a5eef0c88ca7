"""Answer in place of the operator when the store of a local run asks whether it is the only one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob._runtime.contract.messages import ExpectedPod, Report


def request_to_confirm(report: Report | None, pods: Iterable[ExpectedPod]) -> float:
    """Return the request that can be confirmed: the time in `report`; 0 if none is open or it must wait.

    It must wait while a pod lives that is missing in the store and may still train an earlier round. `pods`: those
    whose processes live. If the store does not know which pods are missing, any that it does not report may be one.
    """
    if report is None:
        return 0.0
    alive = {pod.pod for pod in pods}
    if report.pods_that_may_write is None:
        alive -= {agent.pod for agent in report.nodes}
    else:
        alive &= {*report.pods_that_may_write}
    return 0.0 if alive else report.confirmation_request

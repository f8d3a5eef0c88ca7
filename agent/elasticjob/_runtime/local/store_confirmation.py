"""What a local run confirms to its store, in place of the operator. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob._runtime.contract.messages import ExpectedPod, Report


def request_to_confirm(report: Report | None, pods: Iterable[ExpectedPod]) -> float:
    """Return the coordinator's request to confirm its store; 0 while a node that may go on without it lives.

    `pods`: those whose processes live.
    """
    if report is None:
        return 0.0
    alive = {pod.pod for pod in pods}
    if report.pods_that_may_write is None:
        alive -= {node.pod for node in report.nodes}
    else:
        alive &= {*report.pods_that_may_write}
    return 0.0 if alive else report.confirmation_request

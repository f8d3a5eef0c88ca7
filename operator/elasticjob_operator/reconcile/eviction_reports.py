"""The operator's reports in the Evictions of a job's pods."""

from __future__ import annotations

import logging

from elasticjob_operator import manifests
from elasticjob_operator.actions import AnswerEviction
from elasticjob_operator.kube import Conflict, KubeError, NotFound
from elasticjob_operator.kube.api import EVICTIONS
from elasticjob_operator.reconcile.child_requests import ChildRequests, Result

log = logging.getLogger(__name__)


async def answer_eviction(requests: ChildRequests, answer: AnswerEviction) -> Result:
    """Write a report into the Eviction that was observed."""
    eviction, job = answer.eviction, requests.job
    status = manifests.answered_status(eviction.raw, requests.clock(), answer.message, completed=answer.completed)
    try:
        written = await requests.api.update(EVICTIONS, job.namespace, {**eviction.raw, "status": status}, "status")
    except (Conflict, NotFound):
        return Result(eviction.name)  # the watch delivers what has changed, and the next reconcile answers that
    except KubeError as error:
        log.warning("%s/%s: no report in Eviction %s: %s", job.namespace, job.name, eviction.name, error)
        return Result(eviction.name, problem=str(error))
    requests.watched.record_eviction(written)
    return Result(eviction.name)

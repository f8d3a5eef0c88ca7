"""Which keys an execution has: status keeps an id of them, and the name of the job's Secret ends with it.

All pods of an execution must have the same keys, so the id changes only while none of them lives. It then becomes that
of the operator's present master key.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_operator.model.observed import Observed


def with_key_id(observed: Observed) -> Observed:
    """Return the observed job with the key id that new pods of this execution get."""
    present, _ = observed.key_ids
    lives = any(pod.end is None for pod in (*observed.workers, *observed.stores))
    if lives or not present:
        return observed
    status = replace(observed.job.status, key_id=present)
    return replace(observed, job=replace(observed.job, status=status))


def next_key_id(observed: Observed, *, resumes: bool, idle: bool) -> str | None:
    """Return `status.keyId`; None without one. `observed`: of `with_key_id`. `resumes`: whether the next execution
    begins now; `idle`: whether this one creates no pods."""
    if resumes:
        return observed.key_ids[1] or None
    written = observed.job.status.raw.get("keyId")
    return written if idle else observed.job.status.key_id or written

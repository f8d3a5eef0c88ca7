"""What is kept of a job between its reconciles."""

from __future__ import annotations

from elasticjob_operator.model.job.job_defaults import NO_DEFAULTS, JobDefaults
from elasticjob_operator.model.observed import parse_job
from elasticjob_operator.observation.job_memory import JobMemory
from support.operator.build import raw_job


def test_a_version_of_a_job_is_parsed_once_and_anew_with_other_defaults() -> None:
    memory, raw = JobMemory("uid"), raw_job()
    assert memory.parsed_as(raw, NO_DEFAULTS) is None
    parsed = parse_job(raw)
    memory.parsed = raw, NO_DEFAULTS, parsed
    assert memory.parsed_as(raw, NO_DEFAULTS) is parsed
    assert memory.parsed_as(raw_job(), NO_DEFAULTS) is None
    assert memory.parsed_as(raw, JobDefaults()) is None

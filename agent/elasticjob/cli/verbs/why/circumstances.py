"""What `why` knows when it decides: objects as the API server returned them, and what could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elasticjob.cli.cluster.resources import KubeObject
from elasticjob.cli.objects.jobs import job_condition
from elasticjob.cli.objects.pods import is_store

Finding: TypeAlias = dict[str, str]
"""`what` is the cause in plain words, `evidence` what Kubernetes says, `next` the command or change that helps."""


@dataclass(frozen=True)
class Circumstances:
    """A job and what is around it. Empty where there is none, or where it could not be read."""

    job: KubeObject
    now: float
    """Unix time."""
    pods: Sequence[KubeObject] = ()
    events: Sequence[KubeObject] = ()
    nodes: Sequence[KubeObject] = ()
    quotas: Sequence[KubeObject] = ()
    workloads: Sequence[KubeObject] = ()

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def workers(self) -> list[KubeObject]:
        return [pod for pod in self.pods if not is_store(pod)]

    def message(self, condition: str) -> str:
        """Return the message of a condition of the job in one line."""
        return " ".join(str(job_condition(self.job, condition).get("message", "")).split())


def finding(what: str, evidence: str = "", next_step: str = "") -> Finding:
    """Return a finding; empty parts are left out."""
    parts = {"what": what, "evidence": " ".join(evidence.split()), "next": next_step}
    return {key: value for key, value in parts.items() if value}

"""`elasticjob why`: why a job is not running, not at full size or slow, and the next command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import (
    ELASTICJOBS,
    EVENT_LIST,
    NODE_LIST,
    POD_LIST,
    QUEUED_WORKLOADS,
    QUOTA_LIST,
    ApiResource,
    KubeObject,
)
from elasticjob.cli.objects.jobs import job_status
from elasticjob.cli.objects.pods import pods_selector
from elasticjob.cli.verbs.why.causes import likely_causes
from elasticjob.cli.verbs.why.circumstances import Circumstances, Finding
from elasticjob.cli.views.output import VerbOutput, without_empty
from elasticjob.cli.views.style import Painter


def show_causes(cluster: Cluster, output: VerbOutput, name: str, now: float) -> int:
    """Show the likely causes; return the exit code. Only the job itself must be readable."""
    job = cluster.get(ELASTICJOBS, name)
    unread: list[str] = []

    def read(resource: ApiResource, selector: str = "") -> list[KubeObject]:
        return _read(unread, resource, lambda: cluster.list(resource, selector))

    queued = bool(job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name"))
    seen = Circumstances(
        job, now, read(POD_LIST, pods_selector(name)), read(EVENT_LIST), read(NODE_LIST), read(QUOTA_LIST),
        read(QUEUED_WORKLOADS) if queued else [],
    )  # fmt: skip
    causes = likely_causes(seen)
    view = without_empty({"job": name, "phase": job_status(job).get("phase"), "causes": causes, "notRead": unread})
    output.show(view, lambda painter: _lines(name, causes, unread, painter))
    return 0


def _read(unread: list[str], resource: ApiResource, read: Callable[[], list[KubeObject]]) -> list[KubeObject]:
    """Return the objects; none, with a note, if the user may not read them or the cluster does not serve them."""
    try:
        return read()
    except RefusedError as error:
        if not error.not_found:
            unread.append(f"{resource.plural}: {error}")
    except ClusterError as error:
        unread.append(f"{resource.plural}: {error}")
    return []


def _lines(name: str, causes: Sequence[Finding], unread: Sequence[str], painter: Painter) -> Iterator[str]:
    if not causes:
        yield f"{name} trains at full size, and nothing that the cluster shows holds it up"
        slow = f"if steps are slow, elasticjob top {name}, and profile one rank"
        yield f"  next: if no step comes, elasticjob stacks {name}; {slow}"
    for number, cause in enumerate(causes):
        if number:
            yield ""
        yield painter.paint(cause["what"], "bold")
        if "evidence" in cause:
            yield f"  {cause['evidence']}"
        if "next" in cause:
            yield f"  next: {painter.paint(cause['next'], 'cyan')}"
    for text in unread:
        yield painter.paint(f"not read: {text}", "dim")

"""`elasticjob logs`: the logs of all ranks or of some, those of the pod that failed first."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from elasticjob._runtime.contract.names import Env, Label, Role
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, POD_LIST, KubeObject
from elasticjob.cli.objects.jobs import has_finished, job_status
from elasticjob.cli.objects.pods import (
    container_env,
    has_log,
    in_order,
    main_container,
    pod_name,
    pod_number,
    pods_selector,
)
from elasticjob.cli.verbs.logs.log_lines import LogChoice, PodLines
from elasticjob.cli.verbs.logs.log_streams import LogItem, LogStreams, sentence
from elasticjob.cli.views.output import VerbOutput

IDLE_SECONDS = 2.0
"""While nothing arrives, how often it is asked whether the job has ended."""
_TAKEN = ("Preempted", "NodeLost")
FOLLOWED_TAIL = 20
"""Old lines of each pod with --follow and without --tail."""


@dataclass(frozen=True)
class PodChoice:
    """Which pods' logs a person wants."""

    pods: Sequence[str] = ()
    """Names or indices; empty: all."""
    previous: bool = False
    """Only pods that have a successor."""
    role: Role = Role.WORKER
    tail: int | None = None
    lines: LogChoice = field(default_factory=LogChoice)

    def has_pod(self, pod: KubeObject) -> bool:
        """Return whether the pod is chosen by its name or index."""
        return not self.pods or pod_name(pod) in self.pods or str(pod_number(pod, Label.INDEX)) in self.pods


def show_logs(cluster: Cluster, output: VerbOutput, name: str, choice: PodChoice, *, follow: bool) -> int:
    """Write the logs of a job; return the exit code: 1 if a log could not be read, or none is there."""
    job = cluster.get(ELASTICJOBS, name)
    selector = pods_selector(name, choice.role)
    _note_lost_log(cluster, output, job, choice)
    if follow:
        return _follow(cluster, output, name, selector, choice)
    pods = chosen_pods(cluster.list(POD_LIST, selector), choice, failed_pod(job))
    if not pods:
        output.note(f"elasticjob logs: {_why_none(name, choice)}")
        return 1
    failed = False
    for pod in pods:
        failed |= not _show_pod(cluster, output, pod, choice, with_title=len(pods) > 1)
    return int(failed)


def failed_pod(job: KubeObject) -> str:
    """Return the name of the pod of the last failure; empty without one. Pure."""
    return str((job_status(job).get("lastFailure") or {}).get("pod", ""))


def chosen_pods(pods: Sequence[KubeObject], choice: PodChoice, failed: str) -> list[KubeObject]:
    """Return the pods whose logs are shown, in order: the one that failed first. Pure."""
    newest = {pod_number(p, Label.INDEX): pod_number(p, Label.INCARNATION) for p in in_order(pods)}
    found = [
        pod
        for pod in in_order(pods)
        if has_log(pod)
        and choice.has_pod(pod)
        and not (choice.previous and pod_number(pod, Label.INCARNATION) == newest[pod_number(pod, Label.INDEX)])
    ]
    return sorted(found, key=lambda pod: pod_name(pod) != failed)


def _why_none(name: str, choice: PodChoice) -> str:
    if choice.previous:
        return f"no pod of {name} that has a successor exists any more: Kubernetes deletes a pod's log with the pod"
    if choice.pods:
        return f"{name} has no started pod {' or '.join(choice.pods)}: elasticjob status {name} shows its pods"
    return f"no pod of {name} has started: elasticjob why {name}"


def _note_lost_log(cluster: Cluster, output: VerbOutput, job: KubeObject, choice: PodChoice) -> None:
    """Say where the failure is described if the pod that failed is gone with its log."""
    failed = failed_pod(job)
    kind = (job_status(job).get("lastFailure") or {}).get("class", "")
    # A pod that Kubernetes took has no failure to read about.
    if not failed or choice.pods or choice.role is not Role.WORKER or kind in _TAKEN:
        return
    try:
        cluster.get(POD_LIST, failed)
    except RefusedError as error:
        if error.not_found:
            name = job["metadata"]["name"]
            output.note(
                f"pod {failed} failed ({kind}) and its log is deleted: elasticjob status {name} has the end of it"
            )


def _show_pod(cluster: Cluster, output: VerbOutput, pod: KubeObject, choice: PodChoice, *, with_title: bool) -> bool:
    """Write the log of one pod; return whether it could be read."""
    lines = _lines_of(pod, choice, output)
    # The last lines of some ranks are found only by reading all.
    filtered = bool(choice.lines.ranks or choice.lines.round)
    kept: list[str] = []
    try:
        for time, line in cluster.log_lines(pod_name(pod), main_container(pod), tail=None if filtered else choice.tail):
            if (shown := lines.shown_line(time, line)) is None:
                continue
            if with_title and lines.shown == 1:
                output.line(output.painter.paint(f"==> {pod_name(pod)}", "bold"))
            if filtered and choice.tail is not None:
                kept = [*kept, shown][-choice.tail :] if choice.tail else []
            else:
                output.line(shown)
    except ClusterError as error:
        output.note(f"elasticjob logs: {sentence(error)}")
        return False
    for shown in kept:
        output.line(shown)
    return True


def _lines_of(pod: KubeObject, choice: PodChoice, output: VerbOutput) -> PodLines:
    return PodLines(choice.lines, container_env(pod, Env.ROLE), output.painter)


def follow_lines(cluster: Cluster, output: VerbOutput, name: str, index: int) -> Iterator[tuple[str, str]]:
    """Yield (time, line) of what the pods of an index have logged and will log, until the job has ended.

    `output`: takes notes about what cannot be read.
    """
    choice = PodChoice(pods=[str(index)])
    streams = LogStreams(cluster, pods_selector(name, choice.role), choice.has_pod, None)
    yield from ((item.time, item.line) for item in _items(cluster, output, name, streams) if item.line is not None)


def _follow(cluster: Cluster, output: VerbOutput, name: str, selector: str, choice: PodChoice) -> int:
    """Write what all pods log, those too that come later, until the job has ended; return the exit code."""
    tail = FOLLOWED_TAIL if choice.tail is None else choice.tail
    streams = LogStreams(cluster, selector, choice.has_pod, tail)
    lines: dict[str, PodLines] = {}
    given_up = False
    for item in _items(cluster, output, name, streams):
        if item.line is not None:
            pod_lines = lines.setdefault(item.pod, _lines_of(streams.pods[item.pod], choice, output))
            if (shown := pod_lines.shown_line(item.time, item.line)) is not None:
                output.line(shown)
        given_up |= item.ended and bool(item.problem)
    return int(given_up)


def _items(cluster: Cluster, output: VerbOutput, name: str, streams: LogStreams) -> Iterator[LogItem]:
    """Yield all items until the job has ended and no pod is followed. Write problems as notes."""
    streams.start()
    try:
        while True:
            try:
                item = streams.items.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if not streams.open and _has_ended(cluster, output, name):
                    return
                continue
            yield item
            if item.problem:
                output.note(f"elasticjob logs: {item.problem}")
            if item.ended:
                streams.ended(item.pod)
    finally:
        streams.close()


def _has_ended(cluster: Cluster, output: VerbOutput, name: str) -> bool:
    try:
        return has_finished(cluster.get(ELASTICJOBS, name))
    except RefusedError as error:
        if error.not_found:
            return True
        output.note(f"elasticjob logs: {error}")
    except ClusterError as error:
        output.note(f"elasticjob logs: {error}")
    return False

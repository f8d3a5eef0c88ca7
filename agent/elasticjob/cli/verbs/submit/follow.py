"""Follow a job until it ends: its logs, what its conditions say until it trains, and its progress."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress

from elasticjob._runtime.contract.names import Env, Role
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError, RefusedError
from elasticjob.cli.cluster.resources import ELASTICJOBS, KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_condition, job_status
from elasticjob.cli.objects.pods import container_env, pods_selector
from elasticjob.cli.objects.waiting import describe_job
from elasticjob.cli.verbs.logs.log_lines import LogChoice, PodLines
from elasticjob.cli.verbs.logs.log_streams import LogItem, LogStreams
from elasticjob.cli.views.job_text import progress_text
from elasticjob.cli.views.output import VerbOutput

POLL_SECONDS = 1.0
PROGRESS_SECONDS = 10.0
"""At most so often the progress is written, if it has changed."""
LAST_LINES_SECONDS = 10.0
"""How long the last lines of pods are waited for once the job has ended."""


def follow_job(cluster: Cluster, output: VerbOutput, name: str, interrupted: Callable[[], int | None]) -> int:
    """Write what the worker pods log and how far the job is; return 0 if it succeeds, 1 if it fails or is deleted.

    `interrupted`: called at Ctrl-C; returns the exit code, or None to go on. Lines that are logged meanwhile follow.
    """
    streams = LogStreams(cluster, pods_selector(name, Role.WORKER), lambda _: True, None)
    following = Following(cluster, output, name, streams)
    streams.start()
    try:
        while True:
            try:
                if (code := following.step(time.monotonic())) is not None:
                    return code
            except KeyboardInterrupt:
                if (code := interrupted()) is not None:
                    return code
    finally:
        streams.close()


class Following:
    """A job that is followed."""

    def __init__(self, cluster: Cluster, output: VerbOutput, name: str, streams: LogStreams) -> None:
        self._cluster = cluster
        self._output = output
        self._name = name
        self._streams = streams
        self._lines: dict[str, PodLines] = {}
        self._story = _Story(output)
        self._job: KubeObject | None = {"metadata": {"name": name}}
        self._ended_at: float | None = None
        self._asked = 0.0

    def step(self, now: float) -> int | None:
        """Write the next line, or what the job says; return the exit code once it has ended."""
        if self._ended_at is None and now >= self._asked + POLL_SECONDS:
            self._job, self._asked = self._read(self._job), now
            if self._job is not None:
                self._story.tell(self._job, now)
            if self._job is None or has_finished(self._job):
                self._ended_at = now
        if self._ended_at is not None and (not self._streams.open or now >= self._ended_at + LAST_LINES_SECONDS):
            while not self._streams.items.empty():
                self._write(self._streams.items.get())
            return _result(self._output, self._name, self._job)
        with suppress(queue.Empty):
            self._write(self._streams.items.get(timeout=POLL_SECONDS / 4))
        return None

    def _read(self, before: KubeObject | None) -> KubeObject | None:
        """Return the job; None once it was deleted. While the API server does not answer, it is as before."""
        try:
            return self._cluster.get(ELASTICJOBS, self._name)
        except ClusterError as error:
            if isinstance(error, RefusedError) and error.not_found:
                return None
            self._output.note(f"elasticjob submit: {error}")
        return before

    def _write(self, item: LogItem) -> None:
        if item.line is not None:
            if item.pod not in self._lines:
                role = container_env(self._streams.pods[item.pod], Env.ROLE)
                self._lines[item.pod] = PodLines(LogChoice(), role, self._output.painter)
            if (shown := self._lines[item.pod].shown_line(item.time, item.line)) is not None:
                self._output.line(shown)
        if item.problem:
            self._output.note(f"elasticjob submit: {item.problem}")
        if item.ended:
            self._streams.ended(item.pod)


class _Story:
    """Writes what changes of a job as notes."""

    def __init__(self, output: VerbOutput) -> None:
        self._output = output
        self._told = ""
        self._progress = ""
        self._next = 0.0

    def tell(self, job: KubeObject, now: float) -> None:
        """Write the state if it is a new one, and the progress now and then and at the end."""
        ended = has_finished(job)
        if (state := describe_job(job)) != self._told and not ended:
            self._told = state
            self._output.note(f"  {state}")
        progress = progress_text(job_status(job).get("trainerStatus") or {})
        if progress and progress != self._progress and (ended or now >= self._next):
            self._progress, self._next = progress, now + PROGRESS_SECONDS
            self._output.note(f"  {progress}")


def _result(output: VerbOutput, name: str, job: KubeObject | None) -> int:
    if job is None:
        output.note(f"{name} was deleted")
        return 1
    if is_true(job, "Complete"):
        output.note(f"{name} has succeeded")
        return 0
    message = " ".join(str(job_condition(job, "Failed").get("message", "")).split())
    output.note(f"{name} has failed: {message}" if message else f"{name} has failed")
    output.note(f"elasticjob status {name} says more")
    return 1

"""Follow the logs of many pods at once: a thread for each pod, and one that finds new pods.

Nothing that goes wrong in a thread is lost: it becomes an item of the queue, and the other pods are followed further.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import GONE, ClusterError, RefusedError
from elasticjob.cli.cluster.resources import POD_LIST, KubeObject
from elasticjob.cli.objects.pods import has_log, main_container, main_status, pod_name

RETRY_SECONDS = 1.0
ATTEMPTS = 5
"""Attempts in a row to go on with a log that breaks off without a new line; then the pod is given up."""


class LogItem(NamedTuple):
    """Something that a thread has to say. `pod`: its name; empty if it is about none."""

    pod: str
    time: str = ""
    line: str | None = None
    """A line of the log; None for the other items."""
    problem: str = ""
    """A sentence about what went wrong."""
    ended: bool = False
    """Whether no more items come from this pod."""


class LogStreams:
    """All items come out of `items`. `chosen`: whether a pod is to be followed; `tail`: old lines of each pod."""

    def __init__(self, cluster: Cluster, selector: str, chosen: Callable[[KubeObject], bool], tail: int | None) -> None:
        self.items: queue.SimpleQueue[LogItem] = queue.SimpleQueue()
        self.pods: dict[str, KubeObject] = {}
        """Pods that are or were followed, by name."""
        self._cluster = cluster
        self._selector = selector
        self._chosen = chosen
        self._tail = tail
        self._closed = threading.Event()
        self._open: set[str] = set()
        self._lock = threading.Lock()

    @property
    def open(self) -> int:
        """How many pods are followed now."""
        with self._lock:
            return len(self._open)

    def start(self) -> None:
        """Begin to follow the pods that exist, and those that come."""
        version = self._follow_existing()
        threading.Thread(target=self._watch, args=(version,), daemon=True, name="pods").start()

    def close(self) -> None:
        """Let the threads end once their connections do; they do not keep the process."""
        self._closed.set()

    def ended(self, pod: str) -> None:
        """Note that the item with `ended` of this pod was read."""
        with self._lock:
            self._open.discard(pod)

    def _follow_existing(self) -> str:
        """Follow the pods that exist, and return the resourceVersion of the list."""
        pods, version = self._cluster.list_with_version(POD_LIST, self._selector)
        for pod in pods:
            self._follow(pod)
        return version

    def _follow(self, pod: KubeObject) -> None:
        name = pod_name(pod)
        if name in self.pods or not has_log(pod) or not self._chosen(pod):
            return
        with self._lock:
            self.pods[name] = pod
            self._open.add(name)
        threading.Thread(target=self._read, args=(name, main_container(pod)), daemon=True, name=name).start()

    def _watch(self, version: str) -> None:
        while not self._closed.is_set():
            try:
                for kind, pod in self._cluster.watch(POD_LIST, self._selector, version=version):
                    version = str(pod["metadata"].get("resourceVersion", version))
                    if kind != "DELETED":
                        self._follow(pod)
            except Exception as error:
                if not isinstance(error, RefusedError) or error.status != GONE:
                    self.items.put(LogItem("", problem=f"new pods are not seen for a moment: {sentence(error)}"))
                self._closed.wait(RETRY_SECONDS)
                version = self._list_again(version)

    def _list_again(self, version: str) -> str:
        try:
            return self._follow_existing()
        except Exception:
            return version  # the next attempt of the watch says why

    def _read(self, pod: str, container: str) -> None:
        last, failed, problem = "", 0, ""
        tail = self._tail
        try:
            while failed < ATTEMPTS and not self._closed.is_set():
                before = last
                try:
                    for time, line in self._cluster.log_lines(pod, container, follow=True, tail=tail, since=last):
                        if time > last:  # `since` has a resolution of a second
                            self.items.put(LogItem(pod, time, line))
                            last = time
                except ClusterError as error:
                    problem = sentence(error)
                failed = 0 if last != before else failed + 1
                if not self._still_runs(pod):
                    self.items.put(LogItem(pod, ended=True))
                    return
                if problem:
                    self.items.put(LogItem(pod, problem=f"the log of pod {pod} breaks off and goes on: {problem}"))
                problem, tail = "", None
                self._closed.wait(RETRY_SECONDS)
            self.items.put(LogItem(pod, problem=f"the log of pod {pod} is given up, its pod runs", ended=True))
        except Exception as error:
            text = f"the log of pod {pod} is given up: {sentence(error)}"
            self.items.put(LogItem(pod, problem=text, ended=True))

    def _still_runs(self, pod: str) -> bool:
        try:
            found = self._cluster.get(POD_LIST, pod)
        except RefusedError as error:
            return not error.not_found
        except ClusterError:
            return True
        return "running" in (main_status(found).get("state") or {})


def sentence(error: BaseException) -> str:
    """Return what an exception says; its type too if it is not one of ours."""
    return str(error) if isinstance(error, ClusterError) else f"{type(error).__name__}: {error}"

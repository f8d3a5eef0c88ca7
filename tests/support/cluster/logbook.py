"""Follow the logs of all worker pods of a job and keep their lines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from support.cluster.kube import ApiError, Kube, WaitTimeoutError

_STEP = re.compile(r"\bstep=(\d+)\b.*?\bloss=([-\d.einf]+)\b.*?\bworld=(\d+)\b")
_REQUESTS = 20
"""How often a pod's log is asked for, every half second, while the answer is an error."""

LATE = 1.0
"""Seconds by which the runtime may stamp a line late: it does so when it reads it."""


@dataclass(frozen=True)
class Line:
    """One log line. `time`: Unix seconds by the clock of the pod's node."""

    time: float
    pod: str
    text: str


@dataclass(frozen=True)
class Step:
    """One training step, as one rank reported it. `world` is the world size."""

    time: float
    pod: str
    step: int
    loss: float
    world: int

    @property
    def incarnation(self) -> int:
        """The incarnation of the pod; 0 of the first pod of its index."""
        return int(self.pod.rpartition("-")[2])


@dataclass
class LogBook:
    """The log lines of a job's workers. A context manager: it follows the logs from start to end."""

    kube: Kube
    namespace: str
    job: str
    lines: list[Line] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _followed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    _problems: list[str] = field(default_factory=list)
    """Pods whose logs have ended, or whose node is down."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> LogBook:
        threading.Thread(target=self._watch_pods, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    @property
    def steps(self) -> list[Step]:
        """All steps so far, ordered by time."""
        with self._changed:
            return sorted(self._steps, key=lambda s: s.time)

    def text(self, pod: str = "") -> str:
        with self._changed:
            return "\n".join(f"{line.pod} {line.text}" for line in self.lines if pod in ("", line.pod))

    def wait(self, until: Callable[[], bool], *, timeout: float, what: str) -> None:
        """Wait until `until` holds. It is evaluated again after each new line."""
        end = time.monotonic() + timeout
        with self._changed:
            while not until():
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    tail = "\n".join((*(f"{line.pod} {line.text}" for line in self.lines[-30:]), *self._problems))
                    raise WaitTimeoutError(f"{what}: not within {timeout:g} s; the logs end with\n{tail}")

    def wait_step(self, step: int, timeout: float) -> None:
        """Wait until a rank has reached this step."""
        self.wait(lambda: any(s.step >= step for s in self.steps), timeout=timeout, what=f"step {step}")

    def wait_steps_after(self, moment: float, *, world: int = 0, incarnation: int = 0, timeout: float) -> Step:
        """Wait for the first step after `moment` (Unix seconds) and return it.

        `world`: only steps of this world size; 0: of any. `incarnation`: only steps of pods with this incarnation or a
        later one. A step from before `moment` may bear a time that is up to LATE seconds later.
        """
        what = f"a step after {moment:.1f}" + (f" with world={world}" if world else "")
        what += f" of a pod with incarnation {incarnation} or later" if incarnation else ""

        def after() -> list[Step]:
            steps = (s for s in self.steps if s.time > moment and s.incarnation >= incarnation)
            return [s for s in steps if world in (0, s.world)]

        self.wait(lambda: bool(after()), timeout=timeout, what=what)
        return after()[0]

    def wait_read(self) -> None:
        """Wait until the logs of all pods so far have been read to their end. Call it when the pods have ended."""
        self.wait(lambda: self._followed <= self.ended, timeout=90, what="the ends of all logs")

    def _watch_pods(self) -> None:
        selector = f"elasticjob.dev/job-name={self.job},elasticjob.dev/role=worker"
        while not self._closed.is_set():
            try:
                for _, pod in self.kube.watch("pods", self.namespace, selector=selector, timeout=3600):
                    if self._closed.is_set():
                        return
                    self._follow_new(pod["metadata"]["name"], pod.get("status", {}))
            except (OSError, ApiError, ValueError):
                self._closed.wait(0.5)

    def _follow_new(self, name: str, status: dict[str, object]) -> None:
        if name not in self._followed and status.get("phase") in ("Running", "Succeeded", "Failed"):
            self._followed.add(name)
            threading.Thread(target=self._follow, args=(name,), daemon=True).start()

    def _follow(self, pod: str) -> None:
        try:
            for stamp, text in self._log(pod):
                line, found = Line(_seconds(stamp), pod, text), _STEP.search(text)
                with self._changed:
                    self.lines.append(line)
                    if found:
                        self._steps.append(Step(line.time, pod, int(found[1]), float(found[2]), int(found[3])))
                    self._changed.notify_all()
        except (OSError, ApiError, ValueError) as error:
            # The Node or the pod is down; the lines so far stay. A test that waits for more of them says why.
            self._problems.append(f"the log of {pod} is read no more: {error}")
        finally:
            with self._changed:
                self.ended.add(pod)
                self._changed.notify_all()

    def _log(self, pod: str) -> Iterator[tuple[str, str]]:
        """Yield the (time stamp, text) of each line of a pod's log until it ends.

        A request is refused now and then while a busy kubelet starts the pod. Without another one, all lines of the pod
        would be missing, and a test would wait for its steps in vain.
        """
        for last in (*[False] * (_REQUESTS - 1), True):
            is_first = True
            try:
                for raw in self.kube.follow(pod, self.namespace):
                    if self._closed.is_set():
                        return
                    stamp, _, text = raw.partition(" ")
                    if is_first:
                        _seconds(stamp)  # the kubelet writes its own error without a time
                    is_first = False
                    yield stamp, text
            except (ApiError, ValueError) as error:
                if last or not is_first or (isinstance(error, ApiError) and error.code == 404):
                    raise
                if self._closed.wait(0.5):
                    return
            else:
                return


def _seconds(stamp: str) -> float:
    """Convert an RFC 3339 time with nanoseconds to Unix seconds."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")

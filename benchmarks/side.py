"""The interface of both sides: start, add, kill and drain nodes, and kill the store."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.output import Output
from elasticjob._runtime.agent.processes import descendants

TRAIN = str(Path(__file__).with_name("train.py"))
TRAIN_IN_PROCESS = str(Path(__file__).with_name("train_in_process.py"))


@dataclass(frozen=True)
class Size:
    """The minimum and maximum number of nodes of a job."""

    low: int = 2
    high: int = 4


class Side(ABC):
    """One job: nodes as processes of this machine, each with one worker. A context manager: `close` at the end.

    Methods that start or kill return the time of the action in Unix seconds.
    """

    name: str

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder = folder
        self.size = size
        self.output = Output()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def start(self, nodes: int) -> float:
        """Start the store, if it is a process of its own, and the nodes. Return the time before the first node."""

    @abstractmethod
    def add(self, index: int) -> float:
        """Start one more node. Return the time before it."""

    @abstractmethod
    def kill_node(self, index: int) -> float:
        """Send SIGKILL to a node's agent and worker together."""

    @abstractmethod
    def drain(self, index: int) -> float:
        """Send SIGTERM to a node's agent."""

    @abstractmethod
    def kill_store(self) -> float:
        """Send SIGKILL to the store and start it again on the same port."""

    @abstractmethod
    def dead(self) -> bool:
        """Return whether the job has ended without success."""

    @abstractmethod
    def marks(self, since: float) -> dict[str, float]:
        """Return when each of the phases `detect`, `stop` and `rendezvous` ended after `since`, if known."""

    @abstractmethod
    def close(self) -> None:
        """Kill every process of this job."""

    def kill_worker(self, rank: int) -> float:
        """Send SIGKILL to one worker."""
        return kill(self.output.pid_of(rank))

    def runs(self, world: int, timeout: float, steps: int = 20) -> bool:
        """Wait and return whether a world of this size trains `steps` steps within `timeout` seconds."""

        def enough() -> bool:
            return any(e.step >= steps and e.world == world for e in self.output.events[-50:])

        return self.output.wait(enough, timeout, self.dead)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Send a signal to a process, which may have ended, and return the time (Unix seconds)."""
    moment = time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return moment


def kill_session(leader: int) -> None:
    """Send SIGKILL to a process and its descendants: torchrun's workers lead sessions of their own."""
    for pid in [leader, *sorted(descendants(leader))]:
        kill(pid)

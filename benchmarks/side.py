"""What the rows need of either side: nodes to start, to tell to go, and to take away."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.output import Output

TRAIN = str(Path(__file__).with_name("train.py"))


@dataclass(frozen=True)
class Size:
    """How many nodes a job may have."""

    low: int = 2
    high: int = 4


class Side(ABC):
    """One job's nodes as processes of this machine, each with one worker. A context manager: leaves nothing behind."""

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
        """Start the store, if there is one apart, and this many nodes; the moment before the first."""

    @abstractmethod
    def add(self, index: int) -> float:
        """Start one more node; the moment before."""

    @abstractmethod
    def lose(self, index: int) -> float:
        """SIGKILL a node's agent and worker together; the moment."""

    @abstractmethod
    def tell(self, index: int) -> float:
        """SIGTERM to a node's agent; the moment."""

    @abstractmethod
    def kill_store(self) -> float:
        """SIGKILL the store and start it again on the same port; the moment."""

    @abstractmethod
    def dead(self) -> bool:
        """Whether the job ended."""

    @abstractmethod
    def marks(self, since: float) -> dict[str, float]:
        """When after `since` the last of: `detect`, `stop`, `rendezvous` was over; what is not known is left out."""

    @abstractmethod
    def close(self) -> None:
        """End every process of this job."""

    def kill_worker(self, rank: int) -> float:
        """SIGKILL one worker; the moment."""
        return kill(self.output.pid_of(rank))

    def runs(self, world: int, timeout: float, steps: int = 20) -> bool:
        """Wait until a world of this size has trained for some steps."""
        enough = lambda: any(s.step >= steps and s.world == world for s in self.output.said[-50:])  # noqa: E731
        return self.output.wait(enough, timeout, self.dead)


def kill(pid: int) -> float:
    """SIGKILL; the moment. Nothing happens to one that is gone."""
    import time

    moment = time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return moment


def kill_session(leader: int) -> None:
    """SIGKILL every process of a session: torchrun's workers lead sessions of their own, whose parent leads this."""
    for pid in [leader, *_below(leader)]:
        kill(pid)


def _below(pid: int) -> list[int]:
    from elasticjob.agent.processes import descendants

    return sorted(descendants(pid))

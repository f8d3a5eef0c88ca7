"""The process of a command that runs once in its pod, while it does not count as a process of the round."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.agent.workers.worker import Worker


class CommandState(Enum):
    """How the command of this pod runs."""

    OFF = "off"
    """Once for each rank, as it is: it starts no launcher, or reached Python or a rank before one."""
    ENDED = "ended"
    """Once in this pod, and it does not run."""
    ALONE = "alone"
    """It runs, as the process of local rank 0, and has reached neither a launcher nor a rank."""
    WAITS = "waits"
    """A launcher in it waits for its ranks, which are the processes of the round."""
    GOES_ON = "goes on"
    """It runs, as the process of local rank 0, after a launcher."""


@dataclass
class CommandProcess:
    """What the command runs as."""

    state: CommandState
    pid: int = 0
    worker: Worker | None = None
    stage: int = 0
    """How many launchers the process has reached."""
    ends_with_stop: bool = False
    """Whether it ends with the ranks of a stop in progress."""

    @property
    def is_off(self) -> bool:
        return self.state is CommandState.OFF

    @property
    def waits(self) -> bool:
        return self.state is CommandState.WAITS

    @property
    def runs_alone(self) -> bool:
        """Whether the command is started once in this pod, and not the ranks of a launcher."""
        return self.state not in (CommandState.OFF, CommandState.WAITS)

    @property
    def left_running(self) -> set[int]:
        """Process ids that a stop does not end."""
        return {self.pid} if self.waits and not self.ends_with_stop else set()

    def is_elsewhere(self, finished: int) -> bool:
        """Return whether it waits at another launcher than the first one after so many: it has to start again."""
        return self.waits and self.stage != finished + 1

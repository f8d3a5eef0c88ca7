"""What the agent knows of one worker, whatever the state of its process."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.agent.reporting.worker_output import Tail, WorkerPipe
from elasticjob._runtime.contract.messages import Failure
from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class Worker:
    """A worker of a round, of the last one if its process waits for the next."""

    round: RoundId
    local_rank: int
    rank: int
    error_file: str
    stack_dump_file: str
    pipes: tuple[WorkerPipe, WorkerPipe]
    """Of stdout and stderr, as `tails`."""
    tails: tuple[Tail, Tail]
    failed_calls: int = 0
    """How many calls of its function in a row have failed by an error of their own before they made a step."""
    trained: bool = False
    """Whether an earlier call of its function made a step, as far as the script reports steps; see `RoundTimes.trains`.
    """
    was_prestarted: bool = False
    """Prestarted, called in a round since, but has not finished a step yet."""

    def close(self) -> None:
        """Close the pipes of its output."""
        for pipe in self.pipes:
            pipe.close()


@dataclass(frozen=True)
class EndedWorker:
    """A worker that ended."""

    round: RoundId
    local_rank: int
    failure: Failure | None
    """None: the worker exited 0, or the agent stopped it."""
    as_planned: bool = False
    """The worker stopped at the last step of a planned end; its exit code does not matter then."""

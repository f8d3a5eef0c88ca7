"""Events of an agent: the closed union that `decide` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob._runtime.contract.messages import NO_NEW_PROCESSES, CoordinatorToAgent, Failure, NewProcesses
from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class Received:
    """The coordinator sent a message."""

    message: CoordinatorToAgent


@dataclass(frozen=True)
class LauncherReady:
    """The imports are done: workers can start without delay. Sent again when the fork server is lost."""

    fork_disabled_reason: str = ""
    """Why workers start by exec; empty: they are forked, or the user has turned preloading off."""


@dataclass(frozen=True)
class WorkersPrestarted:
    """The prestarted workers wait at their function, or have ended before it."""


@dataclass(frozen=True)
class FunctionCalled:
    """A worker has called a function that can be called again."""


@dataclass(frozen=True)
class HangGuardKnown:
    """It is known what guards the round's workers against a hang, in place of torch's own time-out."""

    status: str
    """`Announce.hang_guard`."""


@dataclass(frozen=True)
class WorkersLaunched:
    """All workers of the round have been started."""

    round: RoundId


@dataclass(frozen=True)
class WorkerEnded:
    """A worker of the round ended, or could not be started (then none of the round's workers runs in this pod).

    Without a failure the worker exited 0, or the agent stopped it. If its function can be called again, the process may
    still be there.
    """

    round: RoundId
    local_rank: int
    failure: Failure | None = None
    as_planned: bool = False
    """The worker stopped at the last step of a planned end."""


@dataclass(frozen=True)
class StageStarted:
    """The command has reached a launcher, such as torchrun, and the launcher's ranks start for the first time."""

    round: RoundId
    stage: int
    launcher: str
    """As in `StageBegan`."""


@dataclass(frozen=True)
class StageOver:
    """All ranks of a launcher in the command have ended without a failure; the launcher waits."""

    round: RoundId
    stage: int
    """The number of the launcher, from 1."""


@dataclass(frozen=True)
class WorkersHeld:
    """Each worker of the round waits at its next report of a step."""

    round: RoundId
    step: int | None
    """The latest step that a worker may have completed. None: not all workers report steps, so none is held."""


@dataclass(frozen=True)
class LastStepMissed:
    """The hold of the round's workers has expired: they may be past the last step."""

    round: RoundId


@dataclass(frozen=True)
class AllWorkersStopped:
    """No worker of the round runs any more, and a new process-group store listens on `store_port`."""

    store_port: int
    unhealthy: Failure | None = None
    """Set if SIGKILL did not end some processes, and the agent has abandoned them."""
    parked: bool = False
    """Whether processes wait for the next round. Nothing of the old round runs in them."""
    has_state: bool = True
    """As in `WorkersStopped`."""
    new_processes: NewProcesses = NO_NEW_PROCESSES
    """As in `WorkersStopped`."""


@dataclass(frozen=True)
class StateLost:
    """This agent has no training state any more, because the process that had it has ended."""


@dataclass(frozen=True)
class ProgressTimedOut:
    """The round's workers have made steps, but none within the progress timeout."""

    round: RoundId


@dataclass(frozen=True)
class StackReport:
    """The stacks of this pod's workers were dumped; `failure` describes the worker that is farthest behind."""

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class LogConditionMet:
    """The output of a worker has met a condition of spec.logRules."""

    round: RoundId
    failure: Failure
    ends_round: bool
    """False: it is only reported."""


@dataclass(frozen=True)
class AllResultsEnded:
    """In a stop, no worker of the round counts a step any more, and some wait for `BreakCollectivesOfWorkers`."""

    round: RoundId


@dataclass(frozen=True)
class NodeUnhealthy:
    """A health check failed: this agent must not train."""

    failure: Failure


@dataclass(frozen=True)
class SignalReceived:
    """The agent received one of the signals on which it leaves."""

    name: str


@dataclass(frozen=True)
class CutOff:
    """This agent has no permission to write: neither the coordinator nor a majority of the round's agents answers."""


@dataclass(frozen=True)
class LeaveTimedOut:
    """The timer of the last `StartLeaveTimer` has expired."""


@dataclass(frozen=True)
class StoreUnreachable:
    """No coordinator was reachable within the join timeout, and this agent has had no round yet."""

    reason: str


AgentEvent: TypeAlias = (
    Received
    | LauncherReady
    | WorkersPrestarted
    | FunctionCalled
    | HangGuardKnown
    | WorkersLaunched
    | WorkerEnded
    | StageStarted
    | StageOver
    | WorkersHeld
    | LastStepMissed
    | AllResultsEnded
    | AllWorkersStopped
    | StateLost
    | ProgressTimedOut
    | StackReport
    | LogConditionMet
    | NodeUnhealthy
    | CutOff
    | SignalReceived
    | LeaveTimedOut
    | StoreUnreachable
)

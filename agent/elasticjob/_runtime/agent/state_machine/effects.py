"""Effects of an agent: the closed union that `decide` returns and `runner` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob._runtime.contract.messages import AgentToCoordinator, StartRound, Termination
from elasticjob._runtime.contract.names import ExitCode, RoundId


@dataclass(frozen=True)
class Send:
    """Send to the coordinator. Without a link the message is dropped: the next `greeting` carries the state."""

    message: AgentToCoordinator


@dataclass(frozen=True)
class AdmitWorkers:
    """Let the store that this agent hosts for the round serve the workers of all its agents."""

    start: StartRound


@dataclass(frozen=True)
class LaunchWorkers:
    """Start the round's workers; ends in `WorkersLaunched` or `WorkerEnded`."""

    start: StartRound


@dataclass(frozen=True)
class PrestartWorkers:
    """Start workers before their round forms; ends in `WorkersPrestarted`.

    They run the script up to its function and wait there, parked like the processes of a round that has ended.
    """

    provisional: StartRound


@dataclass(frozen=True)
class EndLaunchers:
    """Let the first `stage` launchers of the command end, now or once their ranks have, without another `StageOver`."""

    stage: int


@dataclass(frozen=True)
class HoldWorkers:
    """Let each worker of the round wait at its next report of a step; ends in `WorkersHeld`."""

    round: RoundId


@dataclass(frozen=True)
class StopWorkersAt:
    """Let the held workers continue to this step and stop there; ends in `LastStepMissed` if the hold has expired."""

    round: RoundId
    step: int


@dataclass(frozen=True)
class StopWorkers:
    """Send SIGTERM to every worker, and SIGKILL to it and its descendants `grace` seconds later.

    Ends in `AllWorkersStopped`. A worker whose function can be called again gets no SIGTERM: its function is
    interrupted, and its process stays. With a grace of 0 the other workers get only SIGKILL. If a stop is in progress,
    this effect only shortens its grace period.
    """

    grace: float
    for_good: bool = False
    """No round follows in this pod, so no process stays."""
    job_goes_on: bool = False
    """The job goes on without this agent. Processes that wait for a next round end without running the rest of the
    script, which must not write any more."""
    dump_stacks: bool = False
    """Dump the workers' stacks before the first signal; ends in `StackReport`."""
    at_once: bool = False
    """Send only SIGKILL: no process stays, and none copies its state."""
    discard_state: bool = False
    """The training state in the memory of this pod is not used any more."""


@dataclass(frozen=True)
class BreakCollectivesOfWorkers:
    """Let the workers that have waited for this break their collectives and leave their function."""


@dataclass(frozen=True)
class DumpStacks:
    """Dump the stacks of the round's workers, which continue to run; ends in `StackReport`."""

    round: RoundId


@dataclass(frozen=True)
class CheckHealth:
    """Run the health checks of this Node in the background; ends in `NodeUnhealthy` if one fails."""


@dataclass(frozen=True)
class FreezeWorkers:
    """Stop every process of the workers with SIGSTOP (`on`), or continue it with SIGCONT."""

    on: bool


@dataclass(frozen=True)
class StartLeaveTimer:
    """Send `LeaveTimedOut` after `seconds`; replaces a timer that is running."""

    seconds: float


@dataclass(frozen=True)
class SetNodeEnd:
    """Let the workers of this round and of later ones know that this Node ends in `seconds`; None: it does not."""

    seconds: float | None


@dataclass(frozen=True)
class Log:
    """Write a line to the agent's log."""

    text: str


@dataclass(frozen=True)
class Exit:
    """Write the termination message and exit. No worker is left."""

    code: ExitCode
    termination: Termination


Effect: TypeAlias = (
    Send
    | AdmitWorkers
    | LaunchWorkers
    | PrestartWorkers
    | EndLaunchers
    | HoldWorkers
    | StopWorkersAt
    | StopWorkers
    | BreakCollectivesOfWorkers
    | DumpStacks
    | FreezeWorkers
    | CheckHealth
    | StartLeaveTimer
    | SetNodeEnd
    | Log
    | Exit
)

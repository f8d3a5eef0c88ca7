"""What an agent is to do: the closed union that `machine.decide` gives and `runner` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob.contract.messages import (
    NodeToCoordinator,
    StartRound,
    Termination,
)
from elasticjob.contract.names import ExitCode, RoundId


@dataclass(frozen=True)
class Send:
    """Send to the coordinator, if it is there; `greeting` says it again otherwise."""

    message: NodeToCoordinator


@dataclass(frozen=True)
class LaunchWorkers:
    """Start the round's workers; ends in `Launched` or `WorkerEnded`."""

    start: StartRound


@dataclass(frozen=True)
class HoldWorkers:
    """Let no worker of the round pass its next report; ends in `Held`."""

    round: RoundId


@dataclass(frozen=True)
class StopWorkersAt:
    """Let the workers go on to this step and end there by themselves; `TooLate` where that cannot be."""

    round: RoundId
    step: int


@dataclass(frozen=True)
class StopWorkers:
    """SIGTERM, `grace` seconds, SIGKILL to every worker and its descendants; ends in `AllStopped`. 0: only SIGKILL."""

    grace: float
    dump_stacks: bool = False
    """Before that, ask the workers where they stand; ends in `Stood`."""


@dataclass(frozen=True)
class DumpStacks:
    """Ask the workers of the round where they stand, and let them be; ends in `Stood`."""

    round: RoundId


@dataclass(frozen=True)
class CheckHealth:
    """See whether this node is fit; nobody waits for it. Ends in `Unfit` where it is not."""


@dataclass(frozen=True)
class FreezeWorkers:
    """Stop every process of the workers where it is; not `on`: let them go on."""

    on: bool


@dataclass(frozen=True)
class StartLeaveTimer:
    """After `seconds`: `LeaveUnanswered`."""

    seconds: float


@dataclass(frozen=True)
class Log:
    """A line for people."""

    text: str


@dataclass(frozen=True)
class Exit:
    """Write the termination message and end. No worker is left."""

    code: ExitCode
    termination: Termination


Effect: TypeAlias = (
    Send
    | LaunchWorkers
    | HoldWorkers
    | StopWorkersAt
    | StopWorkers
    | DumpStacks
    | FreezeWorkers
    | CheckHealth
    | StartLeaveTimer
    | Log
    | Exit
)

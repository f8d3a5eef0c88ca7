"""What happens to an agent: the closed union that `machine.decide` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob.contract.messages import (
    CoordinatorToNode,
    Failure,
)
from elasticjob.contract.names import RoundId


@dataclass(frozen=True)
class Received:
    """The coordinator said something."""

    message: CoordinatorToNode


@dataclass(frozen=True)
class LauncherReady:
    """Workers can be started at once from now on."""

    fork_disabled_reason: str = ""
    """Why they start by exec, where the user did not ask for it."""


@dataclass(frozen=True)
class WorkersLaunched:
    """The round's workers run."""

    round: RoundId


@dataclass(frozen=True)
class WorkerEnded:
    """A worker of the round ended (or could not be started: then with all its siblings). No failure: exit 0, or
    ended by a stop."""

    round: RoundId
    local_rank: int
    failure: Failure | None = None
    on_plan: bool = False
    """It stopped at the last step of a planned end."""


@dataclass(frozen=True)
class WorkersHeld:
    """No worker of the round passes its next report; the latest step that this may be. None: they do not report."""

    round: RoundId
    step: int | None


@dataclass(frozen=True)
class LastStepMissed:
    """Workers of the round may be past the last step: they were held for too long."""

    round: RoundId


@dataclass(frozen=True)
class AllWorkersStopped:
    """No process of any worker is left, and a fresh store listens on `store_port`."""

    store_port: int
    unhealthy: Failure | None = None
    """Some are left all the same: stuck in the kernel, and abandoned."""


@dataclass(frozen=True)
class ProgressTimedOut:
    """Workers of the round that made steps have made none for its progress timeout."""

    round: RoundId


@dataclass(frozen=True)
class StackReport:
    """Where the worker of this node that is farthest behind stood when all were asked for a hang."""

    round: RoundId
    failure: Failure


@dataclass(frozen=True)
class NodeUnhealthy:
    """A health check failed: this node must not train."""

    failure: Failure


@dataclass(frozen=True)
class SignalReceived:
    """SIGTERM or SIGINT to the agent."""

    name: str


@dataclass(frozen=True)
class CutOff:
    """Neither the coordinator nor anybody else of the round was heard of for the keep-alive time."""


@dataclass(frozen=True)
class LeaveTimedOut:
    """The time is over that was asked for by `WaitForAnswer`."""


@dataclass(frozen=True)
class StoreUnreachable:
    """The link gave up: never a round, and no coordinator within the join timeout."""

    reason: str


AgentEvent: TypeAlias = (
    Received
    | LauncherReady
    | WorkersLaunched
    | WorkerEnded
    | WorkersHeld
    | LastStepMissed
    | AllWorkersStopped
    | ProgressTimedOut
    | StackReport
    | NodeUnhealthy
    | CutOff
    | SignalReceived
    | LeaveTimedOut
    | StoreUnreachable
)

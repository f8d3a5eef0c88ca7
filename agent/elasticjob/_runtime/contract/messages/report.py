"""What the coordinator sends to the operator: one complete report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.contract.failures.failure_rules import FailureAction
from elasticjob._runtime.contract.messages.failures import Failure, Outcome
from elasticjob._runtime.contract.messages.from_agents import StateReceived, TrainingProgress
from elasticjob._runtime.contract.names import RoundId


class RoundPhase(str, Enum):
    """Phase of a coordinator."""

    STANDBY = "Standby"
    """The store is a passive standby store: it collects announcements and decides nothing."""
    RECOVERING = "Recovering"
    """The store has replaced another one and collects the agents' announcements before it decides anything."""
    GATHERING = "Gathering"
    """No round runs; the coordinator waits for agents."""
    RUNNING = "Running"
    ENDING = "Ending"
    """The members of a round stop their workers."""
    FINISHED = "Finished"


class EndReason(str, Enum):
    """Why a round ended. Those that lead to a restart are reasons of the `Restarting` condition too."""

    WORKER_FAILED = "WorkerFailed"
    """A worker failed or hung by itself. The only reason for which a restart is charged."""
    AGENT_LOST = "AgentLost"
    """An agent's connection was lost, or the agent did not stop its workers in time, or the last process with the
    training state ended as the round began."""
    NODE_LEFT = "NodeLeft"
    """An agent was drained, its pod was deleted, or the agent was unhealthy, and it left."""
    SCALING_UP = "ScalingUp"
    """Ready agents join."""
    SCALING_DOWN = "ScalingDown"
    """The job needs fewer worker pods, or none of the indices that left."""
    CODE_UPDATED = "CodeUpdated"
    """The job has other code now (`RoundSettings.code`)."""
    SUCCEEDED = "Succeeded"


@dataclass(frozen=True)
class RoundEnded:
    """One ended round. Reports repeat it until `OperatorView.charged_round` has reached it."""

    round: RoundId
    reason: EndReason
    message: str
    charged: bool
    """The end counts against the restart budget."""
    time: float
    """When it ended; Unix seconds of the coordinator."""
    world_size: int
    failure: Failure | None = None
    """The root cause; None if no failure ended the round."""
    lost_pods: tuple[str, ...] = ()
    """Names of pods that were lost or left."""
    rule: str = ""
    """Name of the failure rule that matched the root cause; empty if none did."""
    action: FailureAction | None = None
    """That rule's action."""


@dataclass(frozen=True)
class RecoverySeconds:
    """Seconds of each phase from a fault until the workers of the next round have started."""

    pods: tuple[str, ...]
    """Names of the pods that failed, were lost or left."""
    detect: float
    """From the failure until the coordinator ended the round. Compares the clocks of two hosts."""
    stop: float
    """Until no worker of the old round was left."""
    rendezvous: float
    """Until the next round was formed."""
    start: float
    """Until all workers of the next round had started."""


@dataclass(frozen=True)
class LostTime:
    """What a fault, or several in a row, has cost."""

    round: RoundId
    """The round that made the first new step after it."""
    seconds: float
    """From the fault to that step; to the start of the round's workers, if the script reports no steps."""


@dataclass(frozen=True)
class Straggler:
    """A rank for which all others wait in every step. The figures are from the moment when it was named."""

    rank: int
    pod: str
    own_seconds: float
    """Seconds of a step spent in this rank's own work."""
    median_seconds: float
    """Median of the same figure over the other ranks."""
    time: float
    """When it was named; Unix seconds."""


@dataclass(frozen=True)
class StateTransfer:
    """The slowest transfer of a training state in the last round that had any."""

    received: StateReceived
    pod: str
    """Pod of the rank that received it."""
    time: float
    """When the coordinator learned of it; Unix seconds."""


@dataclass(frozen=True)
class AgentReport:
    """One connected agent."""

    index: int
    incarnation: int
    pod: str
    ready: bool
    """The agent can start workers at once."""
    member: bool
    """The agent is in the current round."""


@dataclass(frozen=True)
class Report:
    """The coordinator's whole view. It goes to each operator when it connects, and after every change."""

    incarnation: int
    """Incarnation of the store."""
    phase: RoundPhase
    reason: str
    """Explanation of the phase, for people."""
    round: RoundId | None
    """The round that runs or ends; None if there is none."""
    rounds: int
    """Number of rounds that this store process has formed or restored."""
    world_size: int
    """Workers in the round; 0 without a round."""
    formed_at: float
    """When all workers of the round had started; Unix seconds, 0 before."""
    nodes: tuple[AgentReport, ...] = ()
    ended_rounds: tuple[RoundEnded, ...] = ()
    outcome: Outcome | None = None
    """SUCCEEDED or FAILED once the job has ended; None before."""
    failure: Failure | None = None
    """The root cause if the outcome is FAILED."""
    lost_pods: tuple[str, ...] = ()
    """Names of pods that are disconnected, or do not stop an old round, although the operator lists them as running."""
    unhealthy: tuple[Failure, ...] = ()
    """One failure for each listed pod that cannot train where it is, and needs a replacement on another Node."""
    active: int = 0
    """Members of the round."""
    recovery: RecoverySeconds | None = None
    """Recovery from the last fault, once it is complete."""
    confirmation_request: float = 0.0
    """When this coordinator asked whether it is the job's only store; Unix seconds, 0 if no request is open."""
    half_missing_round: RoundId | None = None
    """The last round, if a confirmation request is open and **exactly** half of that round's members are missing. None
    also where more than half are."""
    pods_that_may_write: tuple[str, ...] | None = ()
    """While a request is open: pods that are missing here and may go on with an earlier round; None if the coordinator
    does not know all of them."""
    fork_disabled_reason: str = ""
    """Why workers start by exec on the first member, by group rank, that reports a reason; empty if none does."""
    fork_disabled_nodes: int = 0
    """Members that report such a reason."""
    hang_guard: str = ""
    """As in `Announce`, of the first member by group rank that reports one."""
    stall: Failure | None = None
    """The worker to blame for the last stall of the round, if hangs do not end rounds."""
    straggler: Straggler | None = None
    """The straggler of the current round."""
    progress: TrainingProgress | None = None
    """The last progress of any round; None if the script reports none. If nothing else changes, it is reported
    rarely."""
    state_transfer: StateTransfer | None = None
    """None if no rank has received a state since this store began."""
    lost: tuple[LostTime, ...] = ()
    """What the last faults have cost, the oldest first, without those of earlier stores."""
    retired: bool = False
    """This standby store has never been active, and never will be."""
    stage: int = 0
    """The stage whose ranks run, from 2 on (`rendezvous.rounds.stages`); 0: the first one, or the command runs between
    two launchers, or has none."""
    finished_stages: int = 0
    """As in `StartRound`."""
    launchers: tuple[str, ...] = ()
    """As in `StartRound`."""
    view_lease: int = -1
    """`lease` of the last `OperatorView` that the coordinator accepted; -1 before the first."""

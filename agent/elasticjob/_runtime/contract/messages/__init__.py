"""Messages on the control link, and the termination message of a pod. Each module has those of one sender:

    from_agents      agent ──► coordinator       Announce, Ready, WorkersStarted, WorkersFailed, WorkersSucceeded, ...
    to_agents        coordinator ──► agent       StartRound, Standby, PlanEnd, EndRound, Closed, Finish, ...
                     store ──► agent             StandbyStore, StoreActive
    between_members  agent ──► group rank 0      MemberLink, over a link of their own, which stays idle
                     group rank 0 ──► agent      CutOffNotice
    operator_view    operator ──► coordinator    OperatorView, with the job's `round_settings`
    report           coordinator ──► operator    Report
    termination      agent ──► operator          in the termination message of its pod
    failures         part of several messages
    wire_form        `encode`, `decode`, the registry of all messages, and their versions

A round, from its start to its end, between the coordinator and one agent:

    agent                                   coordinator
    Announce, Ready         ──────────────►
                            ◄────────────── StartRound      (Standby: the agent is not in the round)
    WorkersStarted          ──────────────►
                            ◄────────────── PlanEnd         (planned ends only; the agent answers StepReport)
                            ◄────────────── EndRound
    WorkersStopped          ──────────────►
                            ◄────────────── StartRound, Standby or Finish

Where the command of the pods has launchers that follow each other, StageEnded and StageFinished come in between, once
for each launcher (`rendezvous.rounds.stages`).

An agent whose worker fails sends WorkersFailed; the coordinator then ends the round with EndRound to every member. When
every member has sent WorkersSucceeded, the coordinator sends Finish.

Points in time are Unix seconds of the sender's clock, durations are seconds.

A job keeps its version of agents and stores, so an operator works with stores of earlier and of later versions. A
receiver ignores what it does not know of a message (`codec`), and messages of types that it does not know.

No message is queued for a broken connection. After a reconnect the agent's Announce carries its state, the agent
repeats what the coordinator may have missed (`state_machine.greeting`), and the coordinator sends the current
StartRound, PlanEnd or EndRound again. Receivers ignore repetitions. Every OperatorView and every Report is complete.
"""

from __future__ import annotations

from elasticjob._runtime.contract.codec import UnknownMessageError
from elasticjob._runtime.contract.messages.between_members import (
    CutOffNotice,
    MemberLink,
)
from elasticjob._runtime.contract.messages.failures import (
    Failure,
    FailureClass,
    Outcome,
)
from elasticjob._runtime.contract.messages.from_agents import (
    ANY_INDEX,
    NO_NEW_PROCESSES,
    AgentToCoordinator,
    Announce,
    Close,
    LastMembership,
    Leaving,
    MemberState,
    Metric,
    NewerStore,
    NewProcesses,
    NodeResultsEnded,
    QueryClosed,
    Ready,
    StageBegan,
    StageEnded,
    StateReceived,
    StepReport,
    StepTimes,
    TrainingProgress,
    WorkersFailed,
    WorkersStalled,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.messages.operator_view import (
    EndingPod,
    ExpectedPod,
    OperatorView,
    PodState,
)
from elasticjob._runtime.contract.messages.report import (
    AgentReport,
    EndReason,
    LostTime,
    RecoverySeconds,
    Report,
    RoundEnded,
    RoundPhase,
    StateTransfer,
    Straggler,
)
from elasticjob._runtime.contract.messages.round_settings import (
    HangAction,
    RestartStrategy,
    RoundSettings,
    SuccessPolicy,
    allowed_size,
)
from elasticjob._runtime.contract.messages.termination import (
    InRound,
    Termination,
)
from elasticjob._runtime.contract.messages.to_agents import (
    NO_STANDBY_STORE,
    BreakRound,
    Closed,
    CoordinatorToAgent,
    EndRound,
    Finish,
    MachineEnd,
    PlanEnd,
    StageFinished,
    Standby,
    StandbyStore,
    StartRound,
    StoreActive,
    StoreToAgent,
)
from elasticjob._runtime.contract.messages.wire_form import (
    NEW_MESSAGES,
    NEW_VALUES,
    OLDEST_PROTOCOL,
    PROTOCOL,
    Message,
    NewValue,
    decode,
    encode,
    is_known,
)

__all__ = [
    "ANY_INDEX",
    "NEW_MESSAGES",
    "NEW_VALUES",
    "NO_NEW_PROCESSES",
    "NO_STANDBY_STORE",
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "AgentReport",
    "AgentToCoordinator",
    "Announce",
    "BreakRound",
    "Close",
    "Closed",
    "CoordinatorToAgent",
    "CutOffNotice",
    "EndReason",
    "EndRound",
    "EndingPod",
    "ExpectedPod",
    "Failure",
    "FailureClass",
    "Finish",
    "HangAction",
    "InRound",
    "LastMembership",
    "Leaving",
    "LostTime",
    "MachineEnd",
    "MemberLink",
    "MemberState",
    "Message",
    "Metric",
    "NewProcesses",
    "NewValue",
    "NewerStore",
    "NodeResultsEnded",
    "OperatorView",
    "Outcome",
    "PlanEnd",
    "PodState",
    "QueryClosed",
    "Ready",
    "RecoverySeconds",
    "Report",
    "RestartStrategy",
    "RoundEnded",
    "RoundPhase",
    "RoundSettings",
    "StageBegan",
    "StageEnded",
    "StageFinished",
    "Standby",
    "StandbyStore",
    "StartRound",
    "StateReceived",
    "StateTransfer",
    "StepReport",
    "StepTimes",
    "StoreActive",
    "StoreToAgent",
    "Straggler",
    "SuccessPolicy",
    "Termination",
    "TrainingProgress",
    "UnknownMessageError",
    "WorkersFailed",
    "WorkersStalled",
    "WorkersStarted",
    "WorkersStopped",
    "WorkersSucceeded",
    "allowed_size",
    "decode",
    "encode",
    "is_known",
]

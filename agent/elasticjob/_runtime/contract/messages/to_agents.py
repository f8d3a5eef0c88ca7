"""What the coordinator and its store send to the agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob._runtime.contract.log_rules.rules import LogRule
from elasticjob._runtime.contract.messages.failures import Outcome
from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class StartRound:
    """An agent's assignment in a new round: start the workers."""

    round: RoundId
    group_rank: int
    """Rank of the agent among the members of the round, from 0."""
    group_world_size: int
    """Members of the round."""
    rank: int
    """Global rank of the agent's first worker; its other workers have the following ranks."""
    world_size: int
    """Workers in the round."""
    role_rank: int
    """Rank of the agent's first worker within its role."""
    role_world_size: int
    """Workers of that role in the round."""
    master_addr: str
    """Address of the process-group store, on the agent of group rank 0."""
    master_port: int
    restarts: int
    """Restarts counted against the budget so far: TORCHELASTIC_RESTART_COUNT."""
    max_restarts: int
    """The budget."""
    progress_timeout: float = 0.0
    """Seconds without a step, after the first, that make a hang; 0 disables the check."""
    hang_ends_round: bool = True
    """False: a hang is only reported (`WorkersStalled`), and the workers are left running."""
    state_known: bool = True
    """False: no member of the round has a training state, although there was a round before. What a script has read
    before this round, such as a checkpoint, may be outdated."""
    member_addresses: tuple[str, ...] = ()
    """For group rank 0: `Announce.address` of each member, each address once. Its store serves the workers
    there before their agents have links to it. Empty for the other agents."""
    log_rules: tuple[LogRule, ...] = ()
    """What the agent looks for in the output of its workers."""
    finished_stages: int = 0
    """How many launchers of the pod's command are finished in all pods: they return 0 at once where they run again."""
    launchers: tuple[str, ...] = ()
    """`StageBegan.launcher` of each stage so far, by which the agent finds out at which of them its command is."""
    code: str = ""
    """Digest of the code with which the workers start: the same for all members, so that no round has two versions.
    Empty: whatever the agent has."""


@dataclass(frozen=True)
class Standby:
    """The agent is not in the current round: wait for `StartRound`."""

    reason: str
    redundant: bool = False
    """The round is full without this agent (torch's redundancy list)."""
    provisional: StartRound | None = None
    """For a script whose function can be called again: the ranks that the workers of this agent would have if it joined
    the present round as its last agent, with `PRESTART_ROUND` and no address of a store. With these the agent may
    prestart the processes that it lacks: they run the script up to its function. `Ready` follows."""


@dataclass(frozen=True)
class Closed:
    """No further round will form; a running round goes on. Agents outside it get `Finish`."""

    reason: str


@dataclass(frozen=True)
class PlanEnd:
    """The round will end at a step that all ranks can reach: hold the workers, and answer `StepReport` at once."""

    round: RoundId
    reason: str


@dataclass(frozen=True)
class EndRound:
    """Stop the workers of the round, then answer `WorkersStopped`.

    Without `last_step`, the agent stops them: SIGTERM, `grace_seconds`, SIGKILL. With `last_step`, the workers stop by
    themselves after that step within `grace_seconds`; a second `EndRound`, without it, follows for workers that do not.

    The agent keeps the round's process-group store up until `Finish` or the next `StartRound`.
    """

    round: RoundId
    grace_seconds: float
    reason: str
    planned: bool = False
    """The end was planned: a scale-up, a scale-down or a drain, not a failure."""
    last_step: int | None = None
    dump_stacks: bool = False
    """A worker hangs: dump and report the stacks of this agent's workers before stopping them."""


@dataclass(frozen=True)
class StageFinished:
    """The first `stage` launchers of the command are finished in all pods of the round: they end, and the commands go
    on."""

    round: RoundId
    stage: int


@dataclass(frozen=True)
class BreakRound:
    """No member counts steps of the round any more: its collectives may be broken. Answers `NodeResultsEnded`."""

    round: RoundId
    discard: bool = False
    """Other members have broken theirs before: the state of this agent's workers may contain part of a broken
    result."""


@dataclass(frozen=True)
class Finish:
    """Last message to this agent: write the termination message and exit."""

    outcome: Outcome
    reason: str
    """CamelCase, for programs."""
    message: str = ""
    """Details, for people."""


@dataclass(frozen=True)
class MachineEnd:
    """When the Node of the agent's pod ends, as announced. Sent when that changes, and after an `Announce` of an agent
    whose end is known or has been withdrawn."""

    seconds: float | None
    """Seconds from now, 0 or more; None: the announcement was withdrawn."""


@dataclass(frozen=True)
class StandbyStore:
    """The standby store, to which the agents connect when they lose the present one.

    The operator sends it to the store, which sends it to its agents: after each `Announce`, and when it changes.
    """

    incarnation: int
    host: str
    """Address of its pod; empty if there is no standby store."""
    port: int


NO_STANDBY_STORE = StandbyStore(-1, "", 0)


@dataclass(frozen=True)
class StoreActive:
    """This store, which was passive when the agent connected, is the job's store from now on."""


CoordinatorToAgent: TypeAlias = (
    StartRound | Standby | StageFinished | PlanEnd | EndRound | BreakRound | Closed | Finish | MachineEnd
)


StoreToAgent: TypeAlias = StandbyStore | StoreActive
"""Messages about stores, for the agent's side of the control link."""

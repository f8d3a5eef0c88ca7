"""The job's settings for rounds, and which sizes a round may have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.contract.failures.failure_rules import FailureRule
from elasticjob._runtime.contract.log_rules.rules import LogRule


class HangAction(str, Enum):
    """What the coordinator does when training hangs (`spec.hangPolicy.action`)."""

    RESTART_GROUP = "RestartGroup"
    """End the round and start the next one; the restart counts against the budget."""
    FAIL_JOB = "FailJob"
    EVENT = "Event"
    """Report the hang and leave the workers running."""


class RestartStrategy(str, Enum):
    """What follows a round that a failed worker or a lost member ended (`spec.restartStrategy`)."""

    IN_PLACE = "InPlace"
    """Its members start workers again."""
    RECREATE = "Recreate"
    """Its members leave; the operator replaces their pods."""


class SuccessPolicy(str, Enum):
    """When the job has succeeded (`spec.successPolicy`)."""

    ALL = "All"
    """Once the workers of every member of a round have succeeded."""
    ANY = "Any"
    """Once all workers of one member have succeeded; the coordinator then stops the others."""


def allowed_size(nodes: int, low: int, increment: int) -> int:
    """Return the largest size of a round, at most `nodes` members, that is `low` plus a multiple of `increment`.

    `nodes` is at least `low`.
    """
    return nodes - (nodes - low) % increment


@dataclass(frozen=True)
class RoundSettings:
    """The job's settings for rounds: first those of the store's environment, then those of each `OperatorView`."""

    min_nodes: int
    max_nodes: int
    target: int
    """Members that the round should have now (`spec.replicas`), from `min_nodes` to `max_nodes`."""
    spares: int = 0
    """Worker pods beyond the target. They are standbys and replace lost members."""
    max_restarts: int = 3
    """Restarts before the job fails."""
    join_timeout: float = 600.0
    """Seconds that an agent waits for its first round before it gives up."""
    last_call_timeout: float = 30.0
    """Seconds that the first round waits for more agents once `min_nodes` have announced themselves.

    The last call applies only while no operator has named the expected pods.
    """
    stop_grace: float = 1.0
    """Seconds from SIGTERM to SIGKILL after a failure; workers never have less."""
    graceful_shutdown: float = 120.0
    """Seconds that a planned end may take, from its announcement to the last worker's exit, before workers are killed.
    """
    keep_alive_interval: float = 1.0
    """Seconds between the kernel's keep-alive probes on a control link."""
    keep_alive_max_attempts: int = 3
    """Unanswered probes after which a link is lost."""
    scale_up_stabilization: float = 30.0
    """Seconds that a running round waits for further ready agents before it ends to take in those that are ready."""
    progress_timeout: float = 0.0
    """Seconds without a step that make a hang; 0 disables the check. A change applies from the next round."""
    hang_action: HangAction = HangAction.RESTART_GROUP
    """A change to or from `EVENT` applies from the next round."""
    increment: int = 1
    """A round has `min_nodes` plus a multiple of this."""
    restart_window: float = 0.0
    """Seconds from the first restart of a window to its end: restarts before it do not count. 0: all restarts count."""
    backoff: float = 0.0
    """Seconds that the round after the first restart waits; they double with each further restart that counts. 0: no
    round waits."""
    max_backoff: float = 300.0
    """Seconds that a round waits at most."""
    failure_rules: tuple[FailureRule, ...] = ()
    """The first rule that matches the root cause of a round's end decides what follows."""
    log_rules: tuple[LogRule, ...] = ()
    """A change applies from the next round."""
    code: str = ""
    """Digest of the code that `elasticjob submit` has shipped; empty without any. A change ends the round by a plan,
    and the next one has the new code."""
    restart_strategy: RestartStrategy = RestartStrategy.IN_PLACE
    success_policy: SuccessPolicy = SuccessPolicy.ALL

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes ({self.min_nodes}) must be at least 1")
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes ({self.max_nodes}) must be at least min_nodes ({self.min_nodes})")
        if not self.min_nodes <= self.target <= self.max_nodes:
            raise ValueError(f"target ({self.target}) must be within {self.min_nodes} and {self.max_nodes}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts ({self.max_restarts}) must not be negative")
        if self.spares < 0:
            raise ValueError(f"spares ({self.spares}) must not be negative")
        if self.increment < 1:
            raise ValueError(f"increment ({self.increment}) must be at least 1")

    def round_size(self, nodes: int) -> int:
        """Return the size of a round for which this many agents, `min_nodes` or more, are available."""
        return allowed_size(min(nodes, self.target), self.min_nodes, self.increment)

    @property
    def desired_pods(self) -> int:
        """Number of indices that have a pod. Any of their agents may be a member or a standby."""
        return self.target + self.spares

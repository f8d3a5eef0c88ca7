"""What an agent leaves in the termination message of its pod."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages.failures import Failure, Outcome
from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class Termination:
    """An agent's termination message, in /dev/termination-log. `outcome` comes first, so truncation does not lose it.

    A single message with the outcome SUCCEEDED proves that the job succeeded.
    """

    outcome: Outcome
    reason: str
    round: RoundId | None = None
    """The agent's last round; None if it was in none."""
    message: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class InRound:
    """The content of /dev/termination-log from the moment when an agent starts its workers.

    The kubelet finds it there if the agent is killed with its workers, for example at the container's memory limit.
    """

    round: RoundId

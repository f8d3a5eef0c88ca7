"""What the members of a round send each other: each has a link to the agent of group rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.names import RoundId


@dataclass(frozen=True)
class MemberLink:
    """First message on a member's link to the store of its round. It shows group rank 0 which members it reaches."""

    round: RoundId
    group_rank: int
    """Group rank of the sender."""


@dataclass(frozen=True)
class CutOffNotice:
    """Group rank 0 has frozen its workers: it is cut off, and closes this link."""

"""When spare processes start, and what the log says of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_WAIT = 10.0
"""Seconds that a worker without reported steps has for its first step, however short its start was. A first step that
compiles, or loads kernels, should not share the processors with a script that starts."""
FIRST_NOTE = 30.0
"""Seconds after which the log says what a spare process waits for, if its rank's own start was shorter than half of
that."""


@dataclass(frozen=True)
class RankInRound:
    """How far a worker is in the present round."""

    made_step: bool
    called: float | None
    """When it called its function in this round; monotonic time, None if it has not."""


def wait_without_steps(start_seconds: float) -> float:
    """Return the seconds in its function after which a worker counts as training, although it reports no steps.

    A spare process runs the same part of the script as the start of its rank, so at most as much of the round passes
    without spare processes as with those that start.
    """
    return max(start_seconds, SHORTEST_WAIT)


def may_start(ranks: Sequence[RankInRound], start_seconds: float, now: float) -> bool:
    """Return whether the workers of a pod train, and spare processes may take processor time.

    `start_seconds`: the longest time that a worker of this pod took from its start to its function.
    """
    wait = wait_without_steps(start_seconds)
    return all(rank.made_step or (rank.called is not None and now >= rank.called + wait) for rank in ranks)


def describe_spare_wait(local_ranks: Sequence[int], start_seconds: float) -> str:
    """Return the line about spare processes that are asked for and may not start yet."""
    ranks = ", ".join(map(str, local_ranks))
    wait = wait_without_steps(start_seconds)
    return (
        f"spare processes of local ranks {ranks} start once all workers of this pod have made a step "
        f"(elasticjob.progress or State), or have been in their function for {wait:.0f} s"
    )


def first_note(start_seconds: float) -> float:
    """Return the seconds after which a spare process that is not at its function is worth a line in the log."""
    return max(2 * start_seconds, FIRST_NOTE)

"""The sequence number of a training state, by which states of different ranks, copies and files are ordered. Pure.

The rule: the number grows by one with every completed step and with every commit, on every rank. All ranks run the same
script, so the same state has the same number everywhere, and a rollback to an older step has a higher number than the
step that it abandons. At the start of a round all ranks adopt the number of the newest state; the first number after
that is the next multiple of ROUND. A pod that missed that start therefore always has lower numbers than the ranks that
continued without it, however often it has committed meanwhile.
"""

from __future__ import annotations

ROUND = 1 << 32
"""More steps and commits than a process makes in one round."""


class CommitSequence:
    """The sequence number of one rank's state; 0 before the first step or commit."""

    def __init__(self) -> None:
        self.number = 0
        self._lowest = 0
        """No later number is lower than this one."""

    def advance(self) -> None:
        """Count a completed step or a commit."""
        self.number = max(self.number + 1, self._lowest)

    def adopt(self, number: int) -> None:
        """Continue from the newest state of all ranks, which this rank now has."""
        self.number = number
        self._lowest = (number // ROUND + 1) * ROUND

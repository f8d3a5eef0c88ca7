"""The generation of the views that the operator sends to one job's store.

A store drops views of an older generation than the last one that it accepted. The generation is that of the operator's
Lease, which starts over when the Lease is deleted, and is 0 without leader election. So a store reports the generation
that it has accepted, and an operator whose own is not newer continues from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticjob_operator.lease import RENEW_DEADLINE

RAISE_AFTER = RENEW_DEADLINE + 1.0
"""Seconds for which a leader waits before it raises a generation. An operator that leads no longer has stopped by then:
only the holder of the Lease raises it."""


@dataclass
class ViewGeneration:
    """The generation of the views of this operator to one job's store."""

    lease_generation: Callable[[], int]
    _lowest: int = 0
    _sent: int = -1
    """The last generation that this operator has sent to the store; -1: none."""

    def next(self) -> int:
        """Return the generation of the next view."""
        self._sent = self._own()
        return self._sent

    def _own(self) -> int:
        return max(self._lowest, self.lease_generation())

    def is_stale(self, accepted: int) -> bool:
        """Take `Report.view_lease`; return whether the store drops this operator's views, because it has accepted views
        of a newer generation, or of the same one from another operator."""
        return accepted > self._own() or (accepted == self._own() and accepted != self._sent)

    def raise_above(self, accepted: int) -> None:
        """Let the generation of the next view be higher than `accepted`."""
        self._lowest = max(self._lowest, accepted + 1)

"""Messages for users about steps that a restore loses."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elasticjob._runtime.contract.snapshot_format.state_sources import AvailableStates, Transfer, lost_steps
from elasticjob.training import state_exchange
from elasticjob.training.replicated.live.live_state import LiveState


def report_lost_steps(
    available: Sequence[AvailableStates], transfer: Transfer, own: AvailableStates, live: LiveState
) -> None:
    """Write why this rank has no whole state, and on rank 0 which steps are lost, if the ranks go back."""
    lost = lost_steps(available, transfer)
    if lost and own.half_changed:
        report_change(live)
    if lost and state_exchange.rank() == 0:
        sys.stderr.write(
            f"elasticjob: the training goes back to step {transfer.version[1]}, the newest that is whole: {lost} "
            f"steps are lost. No process has step {transfer.version[1] + lost} whole\n"
        )


def report_change(live: LiveState) -> None:
    """Write what an interruption has left half changed on this rank."""
    sys.stderr.write(f"elasticjob: rank {state_exchange.rank()}: {live.describe_change()}\n")

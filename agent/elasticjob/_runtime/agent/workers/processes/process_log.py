"""Lines in the log about processes that end outside of a round."""

from __future__ import annotations

import logging
import time

from elasticjob._runtime.agent.workers.processes.process_table import WorkerProcess

log = logging.getLogger(__name__)

NOTABLE_EXIT = 0.2
"""Log process exits that take longer than this, in seconds."""


def log_end_between_rounds(process: WorkerProcess) -> None:
    """Log that a process has ended by itself before its next round."""
    ahead = "has not reached its function ahead of the next round: its script starts again in that round"
    waited = "ended while it waited for the next round"
    log.info("rank %d %s", process.worker.rank, ahead if process.worker.round.is_prestarted else waited)


def log_long_exit(process: WorkerProcess) -> None:
    """Log how long the exit of a process took, if new workers have waited for it and it was long."""
    seconds = time.monotonic() - process.exiting_since
    if process.reason_to_wait and seconds > NOTABLE_EXIT:
        text = "the kernel took %.1f s to end the process of rank %d; new workers waited for it: %s"
        log.info(text, seconds, process.worker.rank, process.reason_to_wait)

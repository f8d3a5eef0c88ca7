"""How long a process of this pod takes to reach its function, and how long all ranks then take to have one state.

With these times the coordinator decides whether a round waits for a new process: `rendezvous.observations.slow_starts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection


class StartTimes:
    """The times of this pod's last start and last round. `clock`: seconds as in `ProgressReport.time`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = 0.0
        self._started: set[int] = set()
        """Local ranks whose new processes of this round have not called their function yet."""
        self._called_at: dict[int, float] = {}
        """When each rank of this round called its function, by local rank."""
        self._reaches_function_ahead: bool | None = None
        """Whether prestarted processes reach their function; None while none has reached it or ended."""
        self._start_seconds: float | None = None
        self._form_seconds: float | None = None
        self.synced = False
        """Whether `State.sync` had ended in the last round."""

    @property
    def start_seconds(self) -> float | None:
        """As in `NewProcesses`."""
        return self._start_seconds

    @property
    def form_seconds(self) -> float | None:
        """As in `NewProcesses`."""
        return self._form_seconds

    @property
    def may_start_ahead(self) -> bool:
        """As in `NewProcesses`."""
        return self._reaches_function_ahead is not False

    def begin_round(self) -> None:
        self._called_at, self._started = {}, set()

    def begin_start(self, local_ranks: Collection[int]) -> None:
        """Record that new processes of these ranks are about to start in the round."""
        self._started_at, self._started = self._clock(), set(local_ranks)

    def called(self, local_rank: int) -> None:
        """Record that a rank calls its function in the round. If several ranks start together, the last one counts."""
        if local_rank in self._called_at:
            return
        self._called_at[local_rank] = self._clock()
        if local_rank in self._started:
            self._start_seconds = round(self._called_at[local_rank] - self._started_at, 4)

    def ended(self, began: Callable[[int], float | None]) -> None:
        """Record the end of the round. `began`: when a local rank's `State.sync` had ended; None if it has not."""
        times = [(at, began(local_rank)) for local_rank, at in self._called_at.items()]
        # The rank that called its function last did not wait for any other.
        formed = [round(end - at, 4) for at, end in times if end is not None]
        self._form_seconds = min(formed, default=self._form_seconds)
        self.synced = bool(formed)
        self._called_at = {}

    def prestart_reached_function(self) -> None:
        """Record that a prestarted process waits at its function."""
        self._reaches_function_ahead = True

    def prestart_ended(self) -> None:
        """Record that a prestarted process has ended.

        If no such process has reached its function so far, the script may need a round before it gets there.
        """
        self._reaches_function_ahead = bool(self._reaches_function_ahead)

"""Send what the script reports of its training: every few seconds at most, and only if it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elasticjob._runtime.contract.messages import TrainingProgress

INTERVAL = 5.0
"""Seconds between two reports. More frequent ones would wake the agent more often."""


class TrainingReports:
    """Sends reports between `start` and `stop`. Only rank 0 has something to report, and many scripts never do."""

    def __init__(
        self,
        read: Callable[[], TrainingProgress | None],
        send: Callable[[TrainingProgress], None],
        interval: float = INTERVAL,
    ) -> None:
        self._read = read
        self._send = send
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._last: TrainingProgress | None = None

    def start(self) -> None:
        """Send reports from now on, unless they are sent already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._repeat)

    def send_now(self) -> None:
        """Send what is not sent yet. Call it before the message that the workers have ended."""
        progress = self._read()
        if progress is not None and progress != self._last:
            self._last = progress
            self._send(progress)

    def stop(self) -> None:
        """Send the last report of the round."""
        self.send_now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _repeat(self) -> None:
        self._timer = None
        self.send_now()
        self.start()

"""The restarts that count towards maxRestarts: all of them, or those of a window of time. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartWindow:
    """A window that starts with its first restart, and ends a fixed time later (`restartWindowSeconds`)."""

    count: int = 0
    """Restarts in the window."""
    start: float = 0.0
    """When its first failure was reported, Unix seconds; 0 without one."""

    def at(self, time: float, seconds: float) -> RestartWindow:
        """Return the window at this time: an empty one if it is over. With 0 seconds it never is.

        The time is that of the failure, not that of its report. A window may begin on one host and be read on another:
        a clock that is some seconds wrong shifts its end by as much.
        """
        return RestartWindow() if seconds and time >= self.start + seconds else self

    def with_restart(self, time: float, seconds: float) -> RestartWindow:
        """Return the window after a restart at this time."""
        now = self.at(time, seconds)
        return RestartWindow(now.count + 1, now.start if now.count else time)

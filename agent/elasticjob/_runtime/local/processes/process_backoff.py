"""How long a local run waits until it starts a process again."""

from __future__ import annotations

SHORT_LIFE = 5.0
"""Seconds. Each process in a row that ends sooner doubles the delay before the next one starts."""
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0


class ProcessBackoff:
    """The delays of the successive processes of one kind, as a kubelet has them for a container."""

    def __init__(self) -> None:
        self._delay = 0.0

    def delay_after(self, lifetime: float) -> float:
        """Return the seconds until the successor of a process starts that has ended after `lifetime` seconds."""
        short = lifetime < SHORT_LIFE
        self._delay = min(2 * self._delay or _FIRST_DELAY, _LONGEST_DELAY) if short else 0.0
        return self._delay

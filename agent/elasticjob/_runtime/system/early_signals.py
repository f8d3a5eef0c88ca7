"""Signals that arrive while a process imports. PID 1 of a container ignores every signal without a handler."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType


def install_handler(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> list[signal.Signals]:
    """Install the handler and return the signals that have it now. A signal that is ignored stays ignored (nohup)."""
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    return handled


def record_signals(numbers: Sequence[signal.Signals]) -> tuple[list[str], list[signal.Signals]]:
    """Return (names of the signals received so far, a list that grows; the signals that have a handler now)."""
    early: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        early.append(signal.Signals(number).name)

    return early, install_handler(numbers, note)

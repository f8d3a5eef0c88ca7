"""What a local run waits for, in words, and how often it says so. Pure: `now` is an argument, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import Report, RoundPhase

FIRST_LINE_SECONDS = 10.0
"""Seconds of a wait until its first line; each further one comes after twice as long."""


@dataclass(frozen=True)
class Wait:
    """One wait. `repeats`: it ends, so that its lines do too."""

    text: str
    repeats: bool = True


def current_wait(report: Report | None) -> Wait | None:
    """Return what the run waits for; None while workers train, and at the end."""
    if report is None:
        return Wait("the store starts")
    if report.outcome is not None:
        return None
    if not report.formed_at:
        return Wait(describe_phase(report))
    if report.progress is not None and report.progress.round == report.round:
        return None
    # A script need not report anything: one line must do.
    return Wait(
        f"round {report.round}: the script imports, prepares or trains; it has not called elasticjob.progress with a"
        " total or metrics",
        repeats=False,
    )


def describe_phase(report: Report) -> str:
    """Return what a job without training workers does."""
    if report.phase is RoundPhase.RUNNING:
        return f"round {report.round}: {report.reason}"
    return f"{report.phase.value.lower()}: {report.reason}"


class WaitLines:
    """Decides when the run prints a line about a wait."""

    def __init__(self) -> None:
        self._wait: Wait | None = None
        self._since = self._next_at = 0.0

    def line(self, wait: Wait | None, now: float) -> str:
        """Return the line to print now about the current wait; empty if none is due. Call it about each second."""
        if wait != self._wait:
            self._wait, self._since, self._next_at = wait, now, now + FIRST_LINE_SECONDS
        if wait is None or now < self._next_at:
            return ""
        elapsed = now - self._since
        self._next_at = self._since + 2 * elapsed if wait.repeats else float("inf")
        return f"{wait.text}, for {elapsed:.0f} s so far"

"""The output of a local run: lines of text, and on a terminal a live table as well."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticjob._runtime.contract.messages import Report
from elasticjob._runtime.contract.text import printable


@dataclass(frozen=True)
class NodeRow:
    """One pod. `pid` is the agent's process id."""

    index: int
    pod: str
    pid: int


@dataclass(frozen=True)
class RunView:
    """The state of the run for the table. `report` is None until the store has sent its first one."""

    job: str
    target: int
    """Number of pods that the round should have."""
    restarts: int
    """Restarts that count towards maxRestarts."""
    store_pid: int
    pods: tuple[NodeRow, ...]
    report: Report | None


class Screen(Protocol):
    """Where a run writes. `captures_output`: whether the run passes the pods' output to `print_output`."""

    captures_output: bool

    def print_status(self, text: str) -> None:
        """Print one line about the run."""

    def print_output(self, lines: Sequence[str]) -> None:
        """Print lines of a pod's output, without their newlines. Called only if `captures_output`."""

    def show(self, view: RunView) -> None:
        """Show the new state of the run."""

    def close(self) -> None:
        """Restore the terminal at the end of the run. May be called again."""


class PlainScreen:
    """Prints status lines to stderr. The pods write to this process's stdout themselves."""

    captures_output = False

    def print_status(self, text: str) -> None:
        # One write: the pods write to the same file, and an unbuffered print() writes the newline by itself.
        sys.stderr.write(f"[job] {printable(text)}\n")
        sys.stderr.flush()

    def print_output(self, lines: Sequence[str]) -> None:
        raise AssertionError("the pods write their output themselves")

    def show(self, view: RunView) -> None:
        """Do nothing: the status lines report every change."""

    def close(self) -> None:
        """Do nothing: the terminal is unchanged."""

"""What a local run shows: lines always, and where someone looks on, a table that stays."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from elasticjob.contract.messages import Report


@dataclass(frozen=True)
class NodeRow:
    """One node's process. `pid` is the agent's."""

    index: int
    pod: str
    pid: int


@dataclass(frozen=True)
class RunView:
    """The run as a table shows it. `report` is None until the store has spoken."""

    job: str
    target: int
    restarts: int
    store_pid: int
    pods: tuple[NodeRow, ...]
    report: Report | None


class Screen(Protocol):
    """Where a run shows itself. `pipes`: whether the nodes' output is to be given to `line`."""

    captures_output: bool

    def print_status(self, text: str) -> None:
        """One line of the run's own."""

    def print_output(self, text: str) -> None:
        """One line of a node's output, without its newline; only where `pipes`."""

    def show(self, view: RunView) -> None:
        """Something has changed."""

    def close(self) -> None:
        """The run is over. Harmless when repeated."""


class PlainScreen:
    """Lines on stderr; the nodes write to our own stdout."""

    captures_output = False

    def print_status(self, text: str) -> None:
        print(f"[job] {text}", file=sys.stderr, flush=True)

    def print_output(self, text: str) -> None:
        raise AssertionError("nodes write for themselves")

    def show(self, view: RunView) -> None:
        """Nothing: what changed has been said."""

    def close(self) -> None:
        """Nothing is left to put back."""

"""The output of a local run: the states of the nodes in its table, and its lines."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from elasticjob._runtime.contract.messages import AgentReport, Report, RoundPhase, Straggler
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.local.terminal.live_table import render_table
from elasticjob._runtime.local.terminal.screen import NodeRow, PlainScreen, RunView

NODES = (
    AgentReport(0, 0, "toy-0-0", True, True),
    AgentReport(1, 0, "toy-1-0", True, True),
    AgentReport(2, 0, "toy-2-0", True, False),
    AgentReport(3, 0, "toy-3-0", False, False),
)


def states(straggler: Straggler | None) -> list[str]:
    report = Report(0, RoundPhase.RUNNING, "", RoundId(1, 0, 1), 1, 2, 1.0, NODES, active=2, straggler=straggler)
    pods = tuple(NodeRow(index, f"toy-{index}-0", 100 + index) for index in range(5))
    console = Console(width=110)
    with console.capture() as screen:
        console.print(render_table(RunView("toy", 5, 0, 99, pods, report)))
    rows = [line for line in screen.get().splitlines() if "toy-" in line]
    return [row.split(maxsplit=3)[3].strip() for row in rows]


def test_each_node_has_a_state_and_the_straggler_is_named() -> None:
    assert states(None) == ["in the round", "in the round", "ready, waiting", "importing", "starting"]
    with_straggler = states(Straggler(1, "toy-1-0", 0.08, 0.03, 1.0))
    assert with_straggler == ["in the round", "in the round; rank 1 is slow", "ready, waiting", "importing", "starting"]


def test_an_unbuffered_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe2(os.O_DIRECT)  # one read returns what one write wrote
    with os.fdopen(reader, "rb", 0) as output, os.fdopen(writer, "wb", 0) as raw:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, write_through=True))
        PlainScreen().print_status("toy failed")
        assert output.read(100) == b"[job] toy failed\n"

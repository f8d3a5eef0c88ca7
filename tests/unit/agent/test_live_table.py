"""The output of a local run: the states of the nodes in its table, and its lines."""

from __future__ import annotations

import asyncio
import io
import os

import pytest
from rich.console import Console

from elasticjob._runtime.contract.messages import AgentReport, Report, RoundPhase, Straggler
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.local.terminal.live_table import LiveTable, render_table
from elasticjob._runtime.local.terminal.node_output import print_output
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


async def test_lines_that_have_come_together_draw_the_table_once_also_the_last_one_without_an_end() -> None:
    """A job that writes hundreds of lines a second must not wait for its terminal."""
    text = io.StringIO()
    table = LiveTable(Console(file=text, force_terminal=True, width=110))
    table.show(RunView("toy", 1, 0, 99, (), None))
    drawn = text.getvalue().count("starting the store")
    output = asyncio.StreamReader()
    output.feed_data(b"".join(b"step %d\n" % step for step in range(100)) + b"\x1b[31mlast")
    output.feed_eof()
    await print_output(output, table)
    table.close()
    assert [f"step {step}" in text.getvalue() for step in range(100)] == [True] * 100
    assert "last" in text.getvalue()
    assert text.getvalue().count("starting the store") <= drawn + 3

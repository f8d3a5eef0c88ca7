"""The live table of `elasticjob run` on a terminal, and the keys that kill pods and scale the job."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elasticjob._runtime.contract.messages import AgentReport, RoundPhase, Straggler
from elasticjob._runtime.contract.text import printable, with_noun
from elasticjob._runtime.local.terminal.screen import RunView

_HELP = "0-9 kill the pod   s kill the store   + - scale   Ctrl-C drain the pods, again to kill them"


class LiveTable:
    """A `Screen` with the output above and the table below. `listen` reads keys until `close`."""

    captures_output = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._terminal: list[Any] | None = None

    def listen(self, keys: Mapping[str, Callable[[], None]]) -> None:
        """Call the function of each key that is pressed. `close` restores the terminal."""
        self._terminal = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        asyncio.get_running_loop().add_reader(sys.stdin, self._read_keys, keys)

    def _read_keys(self, keys: Mapping[str, Callable[[], None]]) -> None:
        pressed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not pressed:
            asyncio.get_running_loop().remove_reader(sys.stdin)
        for key in pressed:
            if key in keys:
                keys[key]()

    def print_status(self, text: str) -> None:
        self._console.print(Text(f"[job] {printable(text)}", style="bold"), soft_wrap=True)

    def print_output(self, lines: Sequence[str]) -> None:
        # One print: each of them draws the table again.
        self._console.print(Text("\n").join(map(Text.from_ansi, lines)), soft_wrap=True)

    def show(self, view: RunView) -> None:
        self._live.update(render_table(view), refresh=True)

    def close(self) -> None:
        self._live.stop()
        if self._terminal is not None:
            asyncio.get_running_loop().remove_reader(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)
            self._terminal = None


def render_table(view: RunView) -> RenderableType:
    """Return the table of the pods with a title and the help line."""
    report = view.report
    reported = {node.pod: node for node in report.nodes} if report else {}
    straggler = report.straggler if report else None
    table = Table(header_style="dim", box=None)
    for column in ("index", "pod", "pid", "state"):
        table.add_column(column)
    for pod in sorted(view.pods, key=lambda p: p.index):
        state = _state(reported.get(pod.pod), straggler, runs=report is not None and report.formed_at > 0)
        table.add_row(str(pod.index), pod.pod, str(pod.pid), state)
    return Group("", _title(view), table, Text(_HELP, style="dim"))


def _title(view: RunView) -> Text:
    report = view.report
    if report is None:
        return Text(f"{view.job}: starting the store", style="bold")
    phase = report.outcome.value if report.outcome else report.phase.value
    if report.outcome is None and report.phase is RoundPhase.RUNNING and not report.formed_at:
        phase = "Starting"
    text = Text(f"{view.job}: {phase}", style="bold")
    text.append(
        f"   {report.active} of {with_noun(view.target, 'pod')}, {with_noun(report.world_size, 'worker')}",
        style="not bold",
    )
    text.append(f"   round {report.round or '-'}   restarts {view.restarts}", style="not bold")
    return text


def _state(node: AgentReport | None, straggler: Straggler | None, *, runs: bool) -> Text:
    """Return the state of a pod. `runs`: all workers of the round have started."""
    if node is None:
        return Text("starting", style="yellow")
    if node.member and not runs:
        return Text("starts its workers" if node.ready else "importing", style="cyan")
    if node.member and straggler is not None and straggler.pod == node.pod:
        return Text(f"in the round; rank {straggler.rank} is slow", style="yellow")
    if node.member:
        return Text("in the round", style="green")
    return Text("ready, waiting" if node.ready else "importing", style="cyan")

"""The recovery chart: for each fault the seconds of each system, on a logarithmic axis. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any, NamedTuple

from benchmarks.drawing.svg import Picture
from benchmarks.row import BEST, OURS, SHIPPED

_FROM, _TO = 0.01, 100.0
_LEFT, _RIGHT, _BAR = 250, 90, 18
_WIDTH = 920
_SYSTEMS = (
    ("elasticjob", "processes", OURS, "blue"),
    ("elasticjob, in process", "in process", OURS, "green"),
    ("NVIDIA resiliency ext", "in process", "NVIDIA resiliency ext", "amber"),
    ("torchft", "in process", "torchft", "violet"),
    ("torchrun, best settings", "processes", BEST, "red"),
    ("torchrun as shipped", "processes", SHIPPED, "grey"),
)
"""Name in the picture, which of a fault's two rows has it, its name there, and its colour."""
FAULTS = (
    ("a rank raises an exception", "worker-raises", "raises-in-process"),
    ("a worker is killed", "worker-killed", "killed-in-process"),
    ("killed while the others wait in a collective", "collective-stuck", "stuck-in-process"),
    ("a pod is lost with its worker", "node-lost", "lost-in-process"),
    ("a pod is drained", "node-told", None),
    ("a pod joins: pause of the others", "node-joins", "joins-in-process"),
    ("the store is killed: longest pause", "store-killed", None),
    ("a rank hangs: beyond the deadline of 10 s", "rank-hangs", "hangs-in-process"),
)
"""What happens, the row in which processes restart, and the row in process."""


class Bar(NamedTuple):
    """One system at one fault; `seconds` is None if most samples did not recover in the time watched."""

    system: str
    colour: str
    seconds: float | None


def bars(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Bar]]]:
    """Return the faults that have figures, each with its bars in the order of the legend."""
    rows = {result["row"]: result["sides"] for result in results if "sides" in result}
    found = []
    for fault, processes, in_process in FAULTS:
        kinds = {"processes": rows.get(processes, {}), "in process": rows.get(in_process, {})}
        measured = [
            Bar(system, colour, kinds[kind][side]["median"])
            for system, kind, side, colour in _SYSTEMS
            if side in kinds[kind]
        ]
        if measured:
            found.append((fault, measured))
    return found


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture."""
    groups = bars(results)
    height = 96 + sum(len(measured) * (_BAR + 4) + 40 for _, measured in groups)
    picture = Picture(_WIDTH, height, "Seconds from a fault to the next step, by system")
    picture.label(20, 30, "Seconds from the fault to the first step after it", bold=True, size=16)
    about = "Medians, logarithmic axis. Four pods of one worker as local processes, CPUs."
    picture.label(20, 50, about, faint=True, size=12)
    top = 76
    for exponent in range(-2, 3):
        x = _at(10.0**exponent)
        picture.line(x, top, x, height - 16, dashed=True, weak=True)
        picture.label(x, top - 6, f"{10.0**exponent:g} s", anchor="middle", size=12, faint=True)
    y = top + 8.0
    for fault, measured in groups:
        picture.label(20, y + 18, fault, bold=True, size=13)
        y += 28
        for bar in measured:
            picture.label(_LEFT - 10, y + 13, bar.system, anchor="end", size=12)
            end = _at(_TO if bar.seconds is None else bar.seconds)
            if bar.seconds is None:
                picture.label(_LEFT + 6, y + 13, "did not recover in the time watched", size=12, faint=True)
            else:
                picture.box(_LEFT, y, max(end - _LEFT, 2), _BAR, bar.colour, 3)
                picture.label(end + 6, y + 13, f"{bar.seconds:.2g} s", size=12)
            y += _BAR + 4
        y += 12
    return picture.text()


def _at(seconds: float) -> float:
    share = (log10(max(seconds, _FROM)) - log10(_FROM)) / (log10(_TO) - log10(_FROM))
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

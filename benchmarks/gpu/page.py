"""The GPU part of docs/contribute/benchmarks.md, between two markers, from the raw figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ORDER, ROWS, SEEN
from benchmarks.row import OURS, Row

BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
Figures = Mapping[str, Any]


def load(folder: Path) -> list[Figures]:
    """Return the results of `make gpu` in a folder, in the order of the table."""
    results = [json.loads(path.read_text()) for path in folder.glob("gpu-*.json")]
    return sorted(results, key=lambda figures: ORDER.get(figures["row"], len(ORDER)))


def replace(page: str, part: str) -> str:
    """Return the page with another GPU part. It is added at the end if the page has none."""
    before, begin, rest = page.partition(BEGIN)
    if not begin:
        return f"{page}\n{part}" if page else part
    return before + part.rstrip("\n") + rest.partition(END)[2]


def part(results: Sequence[Figures]) -> str:
    """Return the GPU part with its markers."""
    by_row = {figures["row"]: figures for figures in results}
    lines = [BEGIN, "## On a GPU\n", _about(results)]
    lines += ["| row | measured | must reach | seen before |", "|---|---|---|---|"]
    lines += [_line(row, by_row.get(name)) for name, row in ROWS.items()]
    if notes := _notes(results):
        lines += ["", "### Notes on the GPU's rows\n", *notes]
    return "\n".join([*lines, END, ""])


def _about(results: Sequence[Figures]) -> str:
    if results:
        machines = {json.dumps(figures["machine"], sort_keys=True): figures["machine"] for figures in results}
        measured = f"Measured on {'; '.join(_machine(machine) for machine in machines.values())}."
        missing = len(ROWS.keys() - {figures["row"] for figures in results})
        rest = f" {missing} of the rows have not been run on the current code." if missing else ""
    else:
        measured, rest = "These rows have not been run on the current code, because no GPU was at hand.", ""
    return f"""{measured}{rest}

To run them, use `make gpu` on a machine with one GPU (six minutes; `ROWS=name,...` runs some). All ranks share the GPU,
each as a host of its own for NCCL, over loopback. The model has eight transformer layers of width 512, and trains with
bf16 autocast, AdamW and DDP. Faults are injected into one job, one after the other, and figures are medians. What was
"seen before" are single samples of earlier code on an H100 (torch 2.11, NCCL 2.28.9). `make gpu CPU=1` rehearses the
programs over gloo.
"""


def _machine(machine: Mapping[str, Any]) -> str:
    nccl = f", NCCL {machine['nccl']}" if machine["nccl"] else ""
    return (
        f"one {machine['device']}, {machine['cores']} cores, {machine['memory']}, torch {machine['torch']}{nccl}, "
        f"Python {machine['python']}, {machine['day']}"
    )


def _line(row: Row, figures: Figures | None) -> str:
    sign = "≥" if row.more_is_better else "≤"
    target = "" if row.want is None else f"{sign} {_number(row.want, row.unit)}"
    cells = [row.title, _measured(row, figures) if figures else "not run", target, SEEN.get(row.name, "")]
    return f"| {' | '.join(cells)} |"


def _measured(row: Row, figures: Figures) -> str:
    value = figures["sides"][OURS]["median"]
    if value is None:
        return "**never**" + (" ✗" if row.want is not None else "")
    met = "" if row.want is None else " ✓" if _meets(row, value) else " ✗"
    return f"**{_number(value, row.unit)}**{met}"


def _meets(row: Row, value: float) -> bool:
    assert row.want is not None
    return value >= row.want if row.more_is_better else value <= row.want


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".strip()


def _notes(results: Sequence[Figures]) -> list[str]:
    lines = [f"- `{figures['row']}`: {figures['note']}" for figures in results if figures["note"]]
    for figures in results:
        measured = figures["sides"][OURS]
        texts = sorted({sample["note"] for sample in measured["samples"] if sample["note"]})
        texts += [f"{name} {value:.3g}" for name, value in measured["parts"].items()]
        values = [sample["value"] for sample in measured["samples"]]
        if len(values) > 1:
            texts.append("samples " + ", ".join("never" if v is None else f"{v:.3g}" for v in values))
        lines += [f"- `{figures['row']}`: {'; '.join(texts)}"] if texts else []
    return lines

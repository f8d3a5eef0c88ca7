"""Write docs/contribute/benchmarks.md and its pictures from the raw figures: `python -m benchmarks.report`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import pictures
from benchmarks.drawing import pictures as drawing
from benchmarks.gpu import page as gpu_page
from benchmarks.on_gpu import ON_GPU
from benchmarks.row import BEST, OURS, PAUSE, SHIPPED

Figures: TypeAlias = Mapping[str, Any]
"""The content of one file in benchmarks/results."""

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs/contribute/benchmarks.md"
IMAGES = ROOT / "docs/img"
PHASES = ("detect", "stop", "rendezvous", "start", "import", "first step")
GOODPUT = {"soak-in-process-worker-killed": 0.99, "soak-in-process": 0.97}
"""What these soaks must reach."""
_OTHERS = (SHIPPED, BEST)


def write() -> None:
    """Write the page and its pictures from all results."""
    results = load()
    IMAGES.mkdir(exist_ok=True)
    drawn = pictures.draw([f for f in results if not f["command"].startswith("make gpu")], IMAGES)
    for name, text in drawing.pictures(results).items():
        (IMAGES / f"{name}.svg").write_text(text)
    PAGE.write_text(page(results, drawn))


def load() -> list[Figures]:
    """Return all results in the order of the registry, those of unknown rows last."""
    from benchmarks.registry import ORDER

    results: list[Figures] = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(results, key=lambda f: ORDER.get(f["row"], len(ORDER)))


def page(results: Sequence[Figures], drawn: Iterable[str]) -> str:
    on_gpu = [f for f in results if f["command"].startswith("make gpu")]
    local = [f for f in results if f["command"].startswith("make bench ")]
    cluster = [f for f in results if f["command"].startswith("make bench-cluster")]
    operator = [f for f in results if f["command"].startswith("make bench-operator")]
    soaks = [f for f in results if f["command"].startswith("make soak")]
    recovery = "![Seconds from a fault to the next step, for each fault and system](../img/recovery.svg)\n"
    parts = [_intro(), recovery, *(f"![{name}](../img/{name}.png)\n" for name in drawn)]
    if local:
        parts += ["## Without a cluster\n", _machine(local), table(local), split(local), _notes(local), _on_gpu(local)]
    if cluster:
        parts += ["## In a cluster\n", _machine(cluster), table(cluster), _notes(cluster)]
    if operator:
        parts += ["## The operator\n", _machine(operator), _operator(operator), _notes(operator)]
    for soak in soaks:
        parts.append(_soak(soak))
    parts.append(gpu_page.part(on_gpu))
    return "\n".join(part for part in parts if part)


def _intro() -> str:
    return """# Benchmarks

Generated from `benchmarks/results` by `python -m benchmarks.report`; do not edit.

This page compares elasticjob ("ours") with stock torchrun. A row runs its sides in turn on one machine, each sample
in a job of its own: four nodes of one worker, as local processes, with the same unmodified script
(`benchmarks/train.py`: DDP over gloo on CPUs, AdamW). Recovery is the time from the fault to the first completed step
of the new round. Seconds differ between machines; compare the ratios. "Best settings" are `--monitor-interval=0.1`,
`last_call_timeout=1`, `keep_alive_interval=1`, `keep_alive_max_attempt=2` and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
Rows "in process" run `benchmarks/train_in_process.py`. Those with figures of other libraries run them too, where
`make peers` has installed them. On the loopback address a round's store knows every worker by the address that they
share. Rows "between addresses" give each node a network namespace and an address of its own, as on a cluster; they need
root.
Figures are medians; "never" means that most samples did not recover within the time watched (see the notes). Only
the rows of `make gpu` run [on a GPU](#on-a-gpu).
"""


def _machine(results: Sequence[Figures]) -> str:
    machines = {json.dumps(f["machine"], sort_keys=True): f["machine"] for f in results}
    kinds = {(m["cores"], m["memory"], m["torch"], m["python"]) for m in machines.values()}
    description = "; ".join(f"{c} cores, {m}, torch {t}, Python {p}" for c, m, t, p in sorted(kinds))
    days = sorted({m["day"] for m in machines.values()})
    return f"Measured on {description}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}.\n"


def table(results: Sequence[Figures]) -> str:
    lines = [
        "| row | ours | must reach | torchrun as shipped | torchrun, best settings | ratio | command |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(f) for f in results]) + "\n"


def _line(f: Figures) -> str:
    return "| " + " | ".join([*_cells(f), _ratio(f), f"`{f['command']}`"]) + " |"


def _cells(f: Figures) -> list[str]:
    """Return the title, our figure, the target and the figures of torchrun's two sides."""
    unit, sides = f["unit"], f["sides"]
    ours = sides[OURS]["median"]
    target = "" if f["want"] is None else f"{'≥' if f['more_is_better'] else '≤'} {_number(f['want'], unit)}"
    met = "" if f["want"] is None else " ✓" if _met(f) else " ✗"
    others = [_number(sides[s]["median"], unit) if s in sides else "" for s in _OTHERS]
    extra = [f"{s}: {_number(sides[s]['median'], unit)}" for s in sides if s not in (OURS, *_OTHERS)]
    title = f["title"] + (f" ({'; '.join(extra)})" if extra else "")
    return [title, f"**{_number(ours, unit)}**{met}", target, *others]


def _met(f: Figures) -> bool:
    ours = f["sides"][OURS]["median"]
    if ours is None:
        return False
    return bool(ours >= f["want"] if f["more_is_better"] else ours <= f["want"])


def _ratio(f: Figures) -> str:
    """Return how many times better our median is than the best median of the other sides."""
    ours = f["sides"][OURS]["median"]
    others = [f["sides"][s]["median"] for s in f["sides"] if s != OURS and not s.startswith("floor")]
    values = [v for v in others if v is not None]
    if not ours or not values:
        return ""
    ratio = ours / max(values) if f["more_is_better"] else min(values) / ours
    return f"{ratio:.1f}×"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "never"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _operator(results: Sequence[Figures]) -> str:
    lines = [
        "`make bench-operator` runs the operator with its defaults (100 requests a second) on a real API server and",
        "etcd. One process plays scheduler, kubelets, stores and agents, on the same cores. Pods run 1 to 2 s after",
        "they were created; no training runs.\n",
        "Where `make operator-peer` has built it, Kubeflow's training-operator v1.8.1 creates pods in the same run, on",
        "the same API server, while our operator does not run. Its PyTorchJob controller runs as shipped (20 requests",
        "a second for each of its clients, one worker, a fifth of the jobs), and twice with our number of workers and",
        "our limit of requests: once for all requests, as our limit counts, and once for each of its clients, as",
        "client-go counts (one client creates pods and Services, others write Events and statuses). The ratio is to",
        "the fastest.\n",
        "| row | operator | must reach | ratio |",
        "|---|---|---|---|",
    ]
    for f in results:
        title, ours, target, *_ = _cells(f)
        lines.append(f"| {title} | {ours} | {target} | {_ratio(f)} |")
    return "\n".join(lines) + "\n"


def split(results: Sequence[Figures]) -> str:
    """Return the table of phases, for rows that measure them."""
    lines = [
        "### Where the time goes\n",
        "Seconds, medians of each phase. `start` ends when the last worker runs the script's first line.\n",
        "| row | side | " + " | ".join(PHASES) + " | pause of the others |",
        "|---" * (len(PHASES) + 3) + "|",
    ]
    empty = True
    for f in results:
        for side, measured in f["sides"].items():
            parts = measured["parts"]
            if "first step" in parts:
                empty = False
                cells = [f"{parts[p]:.3f}" if p in parts else "" for p in (*PHASES, PAUSE)]
                lines.append(f"| {f['row']} | {side} | {' | '.join(cells)} |")
    return "" if empty else "\n".join(lines) + "\n"


def _notes(results: Sequence[Figures]) -> str:
    lines = [f"- `{f['row']}`: {f['note']}" for f in results if f["note"]]
    for f in results:
        for side, measured in f["sides"].items():
            notes = sorted({s["note"] for s in measured["samples"] if s["note"]})
            lines += [f"- `{f['row']}`, {side}: {'; '.join(notes)}"] if notes else []
            other = {n: v for n, v in measured["parts"].items() if n not in (*PHASES, PAUSE)}
            if other:
                lines.append(f"- `{f['row']}`, {side}: " + ", ".join(f"{n} {v:,.3g}" for n, v in other.items()))
    return "### Notes\n\n" + "\n".join(lines) + "\n" if lines else ""


def _on_gpu(results: Sequence[Figures]) -> str:
    lines = [f"- `{f['row']}`: {ON_GPU[f['row']]}" for f in results if f["row"] in ON_GPU]
    return "### What a GPU adds\n\nNone of it was measured.\n\n" + "\n".join(lines) + "\n" if lines else ""


def _soak(f: Figures) -> str:
    goal = GOODPUT.get(f["row"])
    met = "" if goal is None else f" Must reach {goal:.0%}: {'✓' if f['goodput'] >= goal else '✗'}"
    lines = [f"## {f['title']}\n", _machine([f]), f"`{f['command']}`: {f['note']}{met}\n"]
    lines += ["| fault | times | recovered in time | p50 | p99 |", "|---|---|---|---|---|"]
    for row in f["faults"]:
        values = [_number(row[name], "s") for name in ("p50", "p99")]
        lines.append(f"| {row['fault']} | {row['times']} | {row['recovered']} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write()

"""Two pictures: the phases of a recovery, and the time of a rendezvous over the number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.row import BEST, OURS, SHIPPED

_PHASES = {
    "detect": "#dc2626", "stop": "#f97316", "rendezvous": "#eab308", "start": "#16a34a", "import": "#0891b2",
    "first step": "#4f46e5",
}  # fmt: skip
_COLOURS = {OURS: "#0f766e", SHIPPED: "#9f1239", BEST: "#b45309"}


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw the pictures that have figures and return their names."""
    import matplotlib as mpl

    mpl.use("Agg")
    results = [f for f in results if "sides" in f]
    drawn = []
    if bars := [(f["row"], side, m) for f in results for side, m in f["sides"].items() if "first step" in m["parts"]]:
        _recovery(bars, folder / "recovery.png")
        drawn.append("recovery")
    if any(f["row"].startswith("rendezvous-") for f in results):
        _rendezvous(results, folder / "rendezvous.png")
        drawn.append("rendezvous")
    return drawn


def _recovery(bars: Sequence[tuple[str, str, Mapping[str, Any]]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 0.45 * len(bars) + 1.6), layout="constrained")
    labels = [f"{row}: {side}" for row, side, _ in bars]
    left = [0.0] * len(bars)
    for phase, colour in _PHASES.items():
        widths = [measured["parts"].get(phase, 0.0) for _, _, measured in bars]
        axes.barh(labels, widths, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for label, end in zip(labels, left, strict=True):
        axes.annotate(f" {end:.2f} s", (end, label), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("seconds from the fault to the first step of the new world (medians of each phase)")
    axes.legend(loc="lower right", fontsize=8)
    _save(figure, path)


def _rendezvous(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for kind, style, label in (("rendezvous", "-", "first"), ("again", "--", "again, running set")):
        for side, colour in _COLOURS.items():
            points = [
                (int(f["row"].rpartition("-")[2]), f["sides"][side]["median"])
                for f in results
                if f["row"].startswith(f"{kind}-") and side in f["sides"] and f["sides"][side]["median"]
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), style, marker="o", color=colour, label=f"{side}, {label}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("nodes, all simulated on one machine")
    axes.set_ylabel("seconds until all have their ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)

"""A picture: the time of a rendezvous over the number of nodes. The others are in `drawing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.row import BEST, OURS, SHIPPED

_COLOURS = {OURS: "#0f766e", SHIPPED: "#9f1239", BEST: "#b45309"}


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw the picture if it has figures, and return the names of those drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    results = [f for f in results if "sides" in f]
    drawn = []
    if any(f["row"].startswith("rendezvous-") for f in results):
        _rendezvous(results, folder / "rendezvous.png")
        drawn.append("rendezvous")
    return drawn


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

"""Draw the loss over time, with a mark for each action."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.cluster.logbook import Step
from timeline import Row


def draw(path: Path, steps: Sequence[Step], rows: Sequence[Row]) -> None:
    """Write a PNG: loss and world size over seconds since the first step, one mark for each action."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    start = steps[0].time
    figure, (loss, world) = plt.subplots(
        2, 1, figsize=(12, 6.5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    times = [s.time - start for s in steps]
    loss.plot(times, [s.loss for s in steps], ".", markersize=3, color="#2563eb")
    loss.set_ylabel("loss")
    loss.set_yscale("log")
    world.step(times, [s.world for s in steps], where="post", color="#0f766e")
    world.set_ylabel("workers")
    world.set_ylim(0, max(s.world for s in steps) + 0.5)
    world.set_xlabel("seconds since the first step")
    for number, row in enumerate(rows, 1):
        at = row.action.time - start
        for axis in (loss, world):
            axis.axvline(at, color="#dc2626", linewidth=0.8, linestyle="--")
        loss.annotate(
            f"{number}. {row.action.what}", (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
            textcoords="offset points", rotation=90, va="top", fontsize=8, color="#7f1d1d",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
    figure.suptitle("One elastic job: loss and workers, with the faults and actions")
    figure.savefig(path, dpi=110)
    plt.close(figure)

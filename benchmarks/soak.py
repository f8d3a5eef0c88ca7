"""`make soak`: one fault a minute of every kind, on the cluster or (`--local`) as processes of this machine.

The digits example trains a fixed number of steps meanwhile. Goodput is the time those steps take undisturbed (their
median pause) over the time they took: work that had to be done again counts as lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from benchmarks import machine, report
from benchmarks.goodput import Deed, Step, summary
from benchmarks.run import RESULTS, end_in_order

STEP_DELAY = 0.1
"""Seconds that the example sleeps in each step."""
STEP = 0.13
"""Seconds that a step takes, about: it decides how many there are."""
STEPS_PER_EPOCH = 15
NODES = 3


class Stage(Protocol):
    """Where a soak takes place."""

    name: str
    kinds: Sequence[str]

    def start(self, arguments: Sequence[str]) -> None:
        """Start the digits example with these arguments and wait for its first steps."""

    def do(self, kind: str, rng: random.Random) -> Deed:
        """One fault; what must be back afterwards."""

    def steps(self) -> list[Step]: ...

    def over(self) -> bool:
        """Whether the job has ended."""

    def finish(self, timeout: float) -> str:
        """Wait for the job's end: `Complete`, or what became of it."""

    def close(self) -> None: ...


def run(stage: Stage, minutes: float, every: float, seed: int) -> dict[str, object]:
    """Do faults until the time is over, wait for the end; the figures."""
    rng = random.Random(seed)
    epochs = max(2, round(minutes * 60 / STEP / STEPS_PER_EPOCH))
    stage.start(("--epochs", str(epochs), "--step-delay", str(STEP_DELAY)))
    deeds: list[Deed] = []
    begin = time.monotonic()
    order = itertools.cycle(rng.sample(list(stage.kinds), len(stage.kinds)))
    while time.monotonic() - begin < minutes * 60 - every and not stage.over():
        time.sleep(every)
        if stage.over():
            break
        kind = next(order)
        deed = stage.do(kind, rng)
        deeds.append(deed)
        print(f"{time.monotonic() - begin:6.0f} s  {deed.fault}: {deed.what}", flush=True)
    end = stage.finish(timeout=minutes * 60 + 300)
    return {"end": end, **summary(stage.steps(), deeds)}


def main() -> int:
    options = _options()
    end_in_order()
    stage = _stage(options.local)
    what = machine.describe()
    try:
        figures = run(stage, options.minutes, options.every, options.seed)
    finally:
        stage.close()
    flags = "".join(f" {n.upper()}={v:g}" for n, v in (("minutes", options.minutes), ("every", options.every)))
    command = f"make soak{' LOCAL=1' if options.local else ''}{flags} SEED={options.seed}"
    goodput = figures["goodput"]
    assert isinstance(goodput, float)
    note = f"the job ended {figures['end']} after {figures['steps']} steps; goodput {goodput:.1%}."
    data = {"row": f"soak-{stage.name}", "title": f"Soak: {stage.name}", "command": command, "machine": what}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"soak-{stage.name}.json").write_text(json.dumps(data | {"note": note} | figures, indent=1) + "\n")
    report.write()
    print(note)
    return 0 if figures["end"] == "Complete" else 1


def _stage(local: bool) -> Stage:
    if local:
        from benchmarks.soak_local import LocalStage  # the other one's imports need the cluster's tools

        return LocalStage(NODES)
    from benchmarks.soak_cluster import ClusterStage

    return ClusterStage(NODES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="between faults")
    parser.add_argument("--local", action="store_true", help="processes of this machine, no cluster")
    parser.add_argument("--seed", type=int, default=1, help="decides the order of the faults and their victims")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

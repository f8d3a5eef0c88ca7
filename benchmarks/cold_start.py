"""The start of four nodes at once (min 2, max 8) until the first step, and the floor: the imports alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.recovery import START, measures, sides
from benchmarks.row import BEST, OURS, SHIPPED, Row, Sample
from benchmarks.side import Side, Size

NODES = 4


def cold_start(side: Side) -> Sample:
    """Start four nodes. The value is the time until the first step of a world of four."""
    began = side.start(NODES)
    if not side.output.wait(lambda: bool(side.output.steps(world=NODES)), START, side.dead):
        return Sample(None, f"no step within {START:g} s")
    first = side.output.steps(world=NODES)[0]
    parts = {}
    for name, kind in (("until the script begins", "begun"), ("until torch is imported", "imported")):
        parts[name] = max(e.time for e in side.output.events if e.kind == kind and e.time < first.time) - began
    return Sample(first.time - began, parts=parts)


def floor(_: Path) -> Sample:
    """Return the CPU seconds of one node's imports, times the nodes, divided by the cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(used * NODES / len(os.sched_getaffinity(0)), parts={"CPU seconds of one": used})


ROWS = [
    Row(
        "cold-start",
        "cold start of 4 nodes, min 2, max 8, until the first step",
        "s",
        None,
        {**measures(cold_start, sides(Size(2, 8))), "floor (imports alone)": floor},
        {OURS: 5, SHIPPED: 3, BEST: 5, "floor (imports alone)": 5},
        200,
        note="The target is 1 s more than the floor: CPU seconds of the imports, divided by the cores. "
        "Our operator expects four pods, as with `replicas: 4`.",
    )
]

"""`make soak`: inject one fault per minute, of each kind in turn, on the cluster or (`--local`) on this machine.

Meanwhile the digits example, or one with in-process restart (`--in-process`), trains a fixed number of steps. Goodput
is the part of the time that the faults did not cost: pauses, and steps that are done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time

from benchmarks import machine, report
from benchmarks.goodput import Fault, summary
from benchmarks.run import RESULTS, exit_on_sigterm
from benchmarks.soak_local import InProcessStage, LocalStage
from benchmarks.soak_stage import STEP, Stage

NODES = 3


def run(stage: Stage, minutes: float, every: float, seed: int) -> dict[str, object]:
    """Inject faults for `minutes`, wait for the job's end, and return the figures. `every`: seconds between faults."""
    rng = random.Random(seed)
    stage.start(round(minutes * 60 / STEP))
    faults: list[Fault] = []
    begin = time.monotonic()
    order = itertools.cycle(rng.sample(list(stage.kinds), len(stage.kinds)))
    while time.monotonic() - begin < minutes * 60 - every and not stage.has_ended():
        time.sleep(every)
        if stage.has_ended():
            break
        kind = next(order)
        fault = stage.inject(kind, rng)
        faults.append(fault)
        print(f"{time.monotonic() - begin:6.0f} s  {fault.kind}: {fault.details}", flush=True)
    end = stage.finish(timeout=minutes * 60 + 300)
    return {"end": end, **summary(stage.steps(), faults)}


def main() -> int:
    options, stage = _options()
    exit_on_sigterm()
    description = machine.describe()
    try:
        figures = run(stage, options.minutes, options.every, options.seed)
    finally:
        stage.close()
    flags = "".join(f" {n.upper()}={v:g}" for n, v in (("minutes", options.minutes), ("every", options.every)))
    where = (" LOCAL=1" if options.local else "") + (" IN_PROCESS=1" if options.in_process else "")
    only = f" ONLY='{options.only}'" if options.only else ""
    command = f"make soak{where}{only}{flags} SEED={options.seed}"
    goodput = figures["goodput"]
    assert isinstance(goodput, float)
    note = f"the job ended {figures['end']} after {figures['steps']} steps; goodput {goodput:.1%}."
    title = f"Soak: {stage.name}{f', {options.only}' if options.only else ''}"
    row = title.removeprefix("Soak: ").replace(",", "").replace(" ", "-")
    data = {"row": f"soak-{row}", "title": title, "command": command, "machine": description}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"soak-{row}.json").write_text(json.dumps(data | {"note": note} | figures, indent=1) + "\n")
    report.write()
    print(note)
    return 0 if figures["end"] == "Complete" else 1


def _stage(options: argparse.Namespace) -> Stage:
    if options.local or options.in_process:
        kinds = InProcessStage if options.in_process else LocalStage
        return kinds(NODES, options.only)
    # On demand: its imports need the tools of the test cluster.
    from benchmarks.soak_cluster import ClusterStage

    return ClusterStage(NODES)


def _options() -> tuple[argparse.Namespace, Stage]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="seconds between faults")
    parser.add_argument("--local", action="store_true", help="use processes of this machine instead of a cluster")
    parser.add_argument("--in-process", action="store_true", help="as --local, with in-process restart")
    parser.add_argument(
        "--only",
        default="",
        metavar="KIND",
        help="the only kind of fault, such as 'worker killed'; with --local or --in-process",
    )
    parser.add_argument("--seed", type=int, default=1, help="determines the order of the faults and their victims")
    options = parser.parse_args()
    if options.only and not (options.local or options.in_process):
        parser.error("--only needs --local or --in-process")
    try:
        return options, _stage(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

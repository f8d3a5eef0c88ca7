"""`make faults`: inject random faults into a job with in-process restart, and compare it with a single process.

Each fault is of a kind drawn from all, also two at once, one in the recovery from another, and one in the recovery
from that. It prints what each one cost, and fails at the first step that is lost, done twice or computed wrong.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.run import exit_on_sigterm
from support.training.fault_draw import draw_incidents
from support.training.faulty_job import FaultReport, FaultyJob, possible_kinds

LOG = Path(tempfile.gettempdir()) / "elasticjob-faults-last.log"
"""The output of the last job."""


def main() -> int:
    options = _options()
    exit_on_sigterm()
    kinds = possible_kinds()
    folder = Path(tempfile.mkdtemp(prefix="elasticjob-faults-"))
    reports: list[FaultReport] = []
    try:
        with FaultyJob(folder, spare_processes=options.spare_processes, queued_device=options.queued_device) as job:
            try:
                incidents, faults = draw_incidents(random.Random(options.seed), kinds), 0
                while faults < options.faults:
                    reports.append(job.inject(next(incidents)))
                    faults += len(reports[-1].incident.faults)
                    print(f"{faults:4} {reports[-1]}", flush=True)
                job.finish()
            finally:
                LOG.write_text(job.text)
                lost = job.text.count("gloo has lost an operation")
            ledger = job.ledger
    finally:
        shutil.rmtree(folder)
    print("\n".join(_table(reports)))
    print(
        f"seed {options.seed}: {len(reports)} incidents with {faults} faults in "
        f"{len(ledger.rounds)} rounds; all {ledger.last_step} steps are those of a single process, "
        f"{ledger.repeated} of them done again; {lost} processes were replaced because gloo had lost an operation"
    )
    return 0


def _table(reports: Iterable[FaultReport]) -> Iterable[str]:
    """Yield the rows of a Markdown table: the incidents with one fault by kind, then the others by their shape."""
    by_kind = defaultdict(list)
    for report in reports:
        by_kind[report.shape].append(report)
    yield "| faults | number | next step, median (longest) | processes replaced, at most |"
    yield "|---|---|---|---|"
    for shape, found in sorted(by_kind.items()):
        seconds = [report.seconds for report in found]
        replaced = max(report.replaced for report in found)
        yield f"| {shape} | {len(found)} | {median(seconds):.2f} s ({max(seconds):.2f} s) | {replaced} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "--faults", type=int, default=200, help="how many faults, or groups of them that belong together"
    )
    parser.add_argument("--spare-processes", action="store_true", help="give each rank one")
    parser.add_argument("--queued-device", action="store_true", help="train on a device that works behind the host")
    parser.add_argument("--seed", type=int, default=1, help="determines the faults, their order and their ranks")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

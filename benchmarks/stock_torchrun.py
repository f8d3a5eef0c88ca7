"""Kill a worker of a job that runs stock torchrun (`rendezvous.backend: c10d`), again and again: how often and how fast
does it train again?

    python benchmarks/stock_torchrun.py [--kills 20] [--nodes 2] [--backend c10d]

Prints one JSON object: seconds from each kill to the first step of the new world on its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.local_run import LocalRun, manifest
from support.torchrun import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--backend", choices=["c10d", "elasticjob"], default="c10d")
    options = parser.parse_args()
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with tempfile.TemporaryDirectory() as folder:
        job = manifest(
            [torchrun, *script(Path(folder))],
            replicas=options.nodes,
            rendezvous={"backend": options.backend},
            preload=["torch", "torch._dynamo"],
            failurePolicy={"maxRestarts": options.kills},
        )
        with LocalRun(job, Path(folder)) as run:
            seconds = recoveries(run, options.nodes, options.kills)
            (Path(folder) / "done").touch()
            code = run.exit_code()
    result = {
        "backend": options.backend,
        "nodes": options.nodes,
        "kills": options.kills,
        "recovered": len(seconds),
        "exit code": code,
        "median": round(statistics.median(seconds), 2),
        "seconds": [round(s, 2) for s in seconds],
    }
    print(json.dumps(result))


def recoveries(run: LocalRun, nodes: int, kills: int) -> list[float]:
    pids, seconds = wait_all(run, nodes), []
    for _ in range(kills):
        moment = time.monotonic()
        os.kill(random.choice(pids), signal.SIGKILL)
        pids = wait_all(run, nodes)
        seconds.append(time.monotonic() - moment)
        print(f"{len(seconds)}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return seconds


def wait_all(run: LocalRun, nodes: int) -> list[int]:
    return [int(run.wait_for(rf"trains \d+ {nodes} \d+ \d+ (\d+)", timeout=120)[1]) for _ in range(nodes)]


if __name__ == "__main__":
    main()

"""How long ranks need to form their process group again after its connections were broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.row import OURS, Row, Sample
from elasticjob._runtime.agent.start_workers.worker_environment import NAME_LOOKUPS

ROOT = Path(__file__).parents[1]
LIMIT = 300.0
"""Seconds that a sample may take."""
_WAYS = {OURS: "ours", "destroy, init": "destroy", "reconfigure": "reconfigure"}


def _row(ranks: int) -> Row:
    def measure(way: str) -> Callable[[Path], Sample]:
        def once(_: Path) -> Sample:
            argv = [sys.executable, "-m", "benchmarks.form_group_again", way, str(ranks)]
            env = {**os.environ, "RES_OPTIONS": NAME_LOOKUPS}
            done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
            return Sample(None, done.stderr.strip()[-300:]) if done.returncode else Sample(float(done.stdout))

        return once

    return Row(
        f"formed-again-{ranks}",
        f"gloo group of {ranks} ranks whose connections were broken: formed again",
        "s",
        None,
        {side: measure(way) for side, way in _WAYS.items()},
        dict.fromkeys(_WAYS, 5),
        60,
        note="`reconfigure` keeps the store of its first round, and notes no addresses for the next break. "
        "If connections are left open it takes 25 ms with four ranks: its threads wake up every 10 ms.",
    )


ROWS = [_row(4), _row(8)]

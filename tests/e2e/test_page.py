"""`elasticjob ui` on the cluster: a worker is killed, and the page in a browser shows it while it happens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.cli.browser import browser
from support.cluster.jobs import Job, kill_worker, manifest
from support.cluster.kube import Json

Submit = Callable[[Json], Job]
SCRIPT = """
import math, time
import elasticjob

step = 0
while True:
    time.sleep(0.05)
    step += 1
    elasticjob.progress(step, total=4000, metrics={"loss": 2 * math.exp(-step / 300)})
"""


def test_a_killed_worker_is_on_the_page_with_its_recovery_and_stacks(
    submit: Submit, cluster_dir: Path, tmp_path: Path
) -> None:
    hangs = {"progressTimeoutSeconds": 600, "action": "Event"}
    job = submit(manifest("watched", ["python3", "-c", SCRIPT], replicas=2, preload=[], hangPolicy=hangs))
    job.wait_status(worldSize=2)
    command = [sys.executable, "-m", "elasticjob", "ui", "-n", job.namespace]
    environ = {**os.environ, "KUBECONFIG": str(cluster_dir / "kubeconfig")}
    with (
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as served,
        browser(tmp_path) as tab,
    ):
        try:
            assert served.stdout is not None
            tab.look(width=1200)
            tab.open(f"{served.stdout.readline().strip()}#/{job.namespace}/watched")
            tab.wait_text("2 of 2 worker pods train")
            tab.wait_text("Loss and throughput")
            kill_worker(cluster_dir, job, "watched-1-0")
            tab.wait_text("Killed of watched-1-0 rank 1")
            tab.wait("document.querySelector('#faults').textContent.includes('Recovered in')")
            tab.wait("document.querySelector('#said').textContent.includes('round 2 trains with 2 workers')")
            rounds = tab.run("[...document.querySelectorAll('#rounds tbody tr')].map((row) => row.textContent)")
            assert [row[0] for row in rounds] == ["2", "1"]
            assert "a fault ended it: Killed of watched-1-0 rank 1" in rounds[1]
            assert tab.run("document.querySelectorAll('#time path.fault').length") == 1
            tab.run("document.querySelector('#stacks button').click()")
            tab.wait_text("2 workers answered")
            assert "in <module>" in tab.run("document.querySelector('#stacks pre').textContent")
            if folder := os.environ.get("PICTURES"):
                for dark in (False, True):
                    for width in (1200, 390):
                        tab.look(width=width, dark=dark)
                        tab.wait(f"document.querySelector('#time svg').clientWidth < {width}")
                        tab.picture(Path(folder) / f"page-{'dark' if dark else 'light'}-{width}.png")
        finally:
            served.terminate()

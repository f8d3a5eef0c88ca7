"""A worker is killed on the test cluster: a real Prometheus and kube-state-metrics show it. `make monitoring`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster.build import monitoring
from cluster.layout import Layout
from monitoring.picture import draw
from support.cluster.install import CHART
from support.cluster.jobs import Job, kill_worker, manifest
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook
from support.cluster.prometheus import Prometheus, prometheus, with_variables

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
VISIBLE = 30.0
"""Seconds after which a killed worker is on both dashboards."""
SCRIPT = """
import math, os, time
from pathlib import Path
import elasticjob

first, last = os.environ["RANK"] == "0", Path("/shared/last")
step = int(last.read_text()) if last.exists() else 0
while True:
    time.sleep(0.1)
    step += 1
    if first:
        last.with_suffix(".new").write_text(str(step))
        last.with_suffix(".new").rename(last)
    print(f"step={step} loss=0 world={os.environ['WORLD_SIZE']}", flush=True)
    elasticjob.progress(step, total=3000, metrics={"loss": 2 * math.exp(-step / 300)})
"""
EMPTY = {
    "job: Straggler", "job: Remaining", "job: Progress", "fleet: Changes of size", "fleet: Nodes that jobs avoid",
    "job: Failed starts of pods",
}  # fmt: skip
"""Panels that a job with one killed worker need not fill: nothing happened that they show, or not for long."""
FAULTS = {
    "failures of the fleet": 'sum(increase(elasticjob_pod_failures_total{class="Killed"}[1m])) > 0',
    "restarts of the fleet": "sum(increase(elasticjob_restarts_total[1m])) > 0",
    "recoveries of the fleet": 'sum(increase(elasticjob_recovery_seconds_count{phase="total"}[1m])) > 0',
    "restarts of the job": "elasticjob_job_restarts{$job} == 1",
    "the failed pod": 'elasticjob_job_last_failure_time_seconds{$job, class="Killed", pod="watched-1-0"}',
}


def panels(name: str) -> list[tuple[str, list[str]]]:
    content = json.loads((CHART / f"files/dashboards/{name}.json").read_text())
    return [(f"{name}: {p['title']}", [target["expr"] for target in p["targets"]]) for p in content["panels"]]


def without_data(server: Prometheus, namespace: str) -> set[str]:
    """Return the panels of both dashboards of which no query returns a sample."""
    wide = {"__rate_interval": "1m", "__range": "5m"}
    variables = {"fleet": {"namespace": ".*", **wide}, "job": {"namespace": namespace, "job_name": "watched", **wide}}
    empty = set()
    for name, values in variables.items():
        for title, queries in panels(name):
            samples = [sample for query in queries for sample in server.query(with_variables(query, values))]
            if not samples:
                empty.add(title)
    return empty


def test_a_killed_worker_is_on_the_dashboards_within_30_seconds(
    submit: Submit, follow: Follow, kube: Kube, cluster_dir: Path, namespace: str, shared_dir: str, tmp_path: Path
) -> None:
    shared = {
        "volumes": [{"name": "shared", "hostPath": {"path": shared_dir}}],
        "mounts": [{"name": "shared", "mountPath": "/shared"}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    with prometheus(kube, monitoring(Layout.default()), tmp_path) as server:
        job = submit(manifest("watched", ["python3", "-c", SCRIPT], replicas=3, preload=[], **shared))
        book = follow(job)
        picture = os.environ.get("PICTURE")
        # A picture shows a minute before and after the fault; the script makes ten steps a second.
        book.wait_step(600 if picture else 30, timeout=180)
        labels = f'namespace="{namespace}", job_name="watched"'
        server.wait(f"elasticjob_job_active_pods{{{labels}}} == 3", bool, timeout=60)
        killed = kill_worker(cluster_dir, job, "watched-1-0")
        seen = {}
        for what, query in FAULTS.items():
            server.wait(query.replace("$job", labels), bool, timeout=VISIBLE)
            seen[what] = round(time.time() - killed, 1)
        print(f"seconds from the kill until Prometheus returned it: {seen}")
        assert max(seen.values()) < VISIBLE
        book.wait_steps_after(killed + (60 if picture else 20), timeout=120)
        assert without_data(server, namespace) <= EMPTY
        assert server.query('ALERTS{alertstate="firing", severity=~"critical|warning"}') == []
        if picture:
            draw(server, namespace, "watched", killed, Path(picture))

"""Kubeflow's training-operator, which `make bench-operator` measures beside ours where `make operator-peer` built it.

It runs alone on the same API server before our operator starts, with simulated pods: first as shipped, then with our
limit of requests. Its jobs and their pods are deleted before ours are created.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.api_server import ADDRESS, ApiServer
from benchmarks.crowd import cpu_seconds
from benchmarks.kube_requests import Json, KubeRequests
from benchmarks.operator_process import LABEL, OperatorProcess, Requests, by_verb, total
from benchmarks.row import Sample
from benchmarks.simulated_pods import SimulatedPods
from cluster import build
from cluster.errors import ClusterError
from cluster.layout import Layout
from elasticjob_operator.settings import OperatorSettings

MODULE = Path(__file__).with_name("tools") / "training_operator"
UPSTREAM = "github.com/kubeflow/training-operator"
DEFINITION = "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"
"""In the folder of the module."""
NAMESPACE = "bench-peer"
JOB_LABEL = "training.kubeflow.org/job-name"
CHILDREN = [f"/api/v1/namespaces/{NAMESPACE}/{plural}" for plural in ("pods", "services")]
PYTORCH_JOBS = f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs"
_OURS = OperatorSettings("", "", "")
_OUR_LIMIT = (f"--qps={_OURS.qps:g}", f"--burst={_OURS.burst}", f"--controller-threads={_OURS.workers}")


@dataclass(frozen=True)
class Side:
    """One way to run training-operator."""

    flags: tuple[str, ...] = ()
    part: float = 1.0
    """How many of the jobs it gets."""


SIDES = {
    "training-operator as shipped": Side(part=0.2),
    "training-operator, limit of all requests": Side((*_OUR_LIMIT, "--limit-in-all")),
    "training-operator, limit of each client": Side(_OUR_LIMIT),
}
"""client-go applies a limit to each client: pods and their Services share one, Events and the status of jobs have
others. As shipped, it is 20 requests a second for each client, and one worker: all jobs would need minutes."""
MISSING = "without Kubeflow's training-operator, which `make operator-peer` builds"
LIMIT = 900.0
"""Seconds that a step may take."""
_COUNT = re.compile(r"^rest_client_requests_total\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class TrainingOperator:
    """Where the program and its CustomResourceDefinition are."""

    program: Path
    definition: Path

    @property
    def built(self) -> bool:
        return self.program.exists()

    def load(self) -> Json:
        """Return the CustomResourceDefinition."""
        found: Json = yaml.safe_load(self.definition.read_text())
        return found


def find() -> TrainingOperator:
    program = build.module_program(Layout.default(), MODULE)
    return TrainingOperator(program, program.with_name(f"{program.name}.yaml"))


def build_peer() -> TrainingOperator:
    """Return training-operator, built unless the cache has it. ClusterError."""
    found = find()
    if not found.built:
        found.definition.parent.mkdir(parents=True, exist_ok=True)
        go = build.go_command()
        command = [go, "mod", "download", UPSTREAM]
        subprocess.run(command, check=True, cwd=MODULE)
        command = [go, "list", "-m", "-f", "{{.Dir}}", UPSTREAM]
        folder = subprocess.run(command, check=True, cwd=MODULE, capture_output=True, text=True).stdout.strip()
        shutil.copyfile(Path(folder) / DEFINITION, found.definition)
        build.build_module(found.program, MODULE, ".", minutes=3)  # last: the program says that the build is complete
    return found


class TrainingOperatorProcess(OperatorProcess):
    """training-operator as the administrator."""

    log = "training-operator.log"

    def __init__(self, server: ApiServer, folder: Path, program: Path, flags: Sequence[str]) -> None:
        super().__init__(server, folder)
        self._program, self._flags = program, flags

    def command(self, port: int) -> list[str]:
        return [str(self._program), f"--metrics-bind-address={ADDRESS}:{port}", *self._flags]

    def parse(self, metrics: str) -> Requests:
        return parse_client_requests(metrics)


def parse_client_requests(metrics: str) -> Requests:
    """Return the requests in the metrics of client-go, by HTTP method and status."""
    found: Requests = Counter()
    for labels, value in _COUNT.findall(metrics):
        named = dict(LABEL.findall(labels))
        found[named["method"], named["code"]] += int(float(value))
    return found


def pytorch_job(name: str, pods: int) -> Json:
    """Return a PyTorchJob of this many pods: a master and workers."""
    container = {"name": "pytorch", "image": "example.org/train:1", "command": ["python", "train.py"]}
    counts = {"Master": 1, "Worker": pods - 1}
    replicas = {
        kind: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
        for kind, count in counts.items()
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"pytorchReplicaSpecs": replicas},
    }


async def measure_peer(
    peer: TrainingOperator, server: ApiServer, api: KubeRequests, folder: Path, jobs: int, pods: int
) -> dict[str, Sample]:
    """Return a sample of each side: pods created a second when its part of `jobs` jobs of `pods` pods is applied at
    once."""
    await api.create_namespace(NAMESPACE)
    await api.define(peer.load(), PYTORCH_JOBS)
    samples = {}
    for name, side in SIDES.items():
        operator = TrainingOperatorProcess(server, folder, peer.program, side.flags)
        try:
            samples[name] = await _create(api, operator, max(1, round(jobs * side.part)), pods)
        except Exception as error:
            problem = f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip()
            samples[name] = Sample(None, problem[:300])
        for path in (PYTORCH_JOBS, *CHILDREN):
            await api.request("DELETE", path, {"gracePeriodSeconds": 0})
    return samples


async def _create(api: KubeRequests, operator: OperatorProcess, jobs: int, size: int) -> Sample:
    pods = SimulatedPods(api, b"", NAMESPACE, selector=JOB_LABEL)
    await pods.start(renew_leases=False)
    operator.start()
    try:
        await operator.wait_until_quiet(LIMIT)
        await _apply(api, [pytorch_job("single", size)])
        await pods.until("the pods of one job exist", lambda: len(pods.created) >= size, LIMIT)
        before, processor = await operator.wait_until_quiet(LIMIT), cpu_seconds(operator.pid)
        began = time.monotonic()
        await _apply(api, [pytorch_job(f"job-{job}", size) for job in range(jobs)])
        applied = time.monotonic() - began
        await pods.until("all pods exist", lambda: len(pods.created) >= size + jobs * size, LIMIT)
        seconds, processor = time.monotonic() - began, cpu_seconds(operator.pid) - processor
        used = await operator.requests() - before
        once_quiet = await operator.wait_until_quiet(LIMIT) - before
    finally:
        await operator.stop()
        await pods.close()
    parts = {
        "jobs": float(jobs),
        "seconds": seconds,
        "seconds of processor": processor,
        "requests a job": total(used) / jobs,
        "requests a job once it has nothing to do": total(once_quiet) / jobs,
        "seconds until all were applied": applied,
    }
    return Sample(jobs * size / seconds, parts={**parts, **by_verb(once_quiet)})


async def _apply(api: KubeRequests, jobs: Iterable[Json]) -> None:
    await asyncio.gather(*(api.request("POST", PYTORCH_JOBS, job) for job in jobs))


def main() -> int:
    try:
        print(build_peer().program)
    except (ClusterError, subprocess.CalledProcessError) as error:
        print(f"training-operator was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

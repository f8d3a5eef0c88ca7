"""The commands of docs/operate/troubleshooting.md, each on a job that has the fault of its section.

All jobs fail at once in one namespace. The test waits until each shows its fault, and then runs the page from its top.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.cluster.jobs import Job
from support.cluster.kube import Json, Kube, is_true
from support.cluster.kubectl import Tools
from support.docs.blocks import blocks_to_run
from support.docs.shell import Shell, own_kubeconfig
from support.docs.troubles import FINALIZER, JOB_OF_SECTION, jobs, scripts, written

HANG_SECONDS = "10"
"""The shortest that the API server accepts; the page has 300."""


@pytest.fixture
def shell(kube: Kube, cluster_dir: Path, namespace: str, tmp_path: Path) -> Iterator[Shell]:
    """kubectl and elasticjob with the namespace of the jobs, which all exist."""
    kubeconfig = own_kubeconfig(cluster_dir / "kubeconfig", namespace, tmp_path)
    for name in ("pending", "fails", "refused"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(written(name)))
    tools = Tools(cluster_dir / "bin", kubeconfig)
    tools.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([scripts(), *jobs().values()]))
    for name, manifest in jobs().items():
        if "managedBy" not in manifest["spec"]:
            begin_with_first_names(tools, Job(kube, namespace, name), manifest)
    yield Shell(tmp_path, [cluster_dir / "bin", Path(sys.executable).parent], {"KUBECONFIG": str(kubeconfig)})
    for pod in kube.list("pods", namespace):
        if pod["metadata"].get("finalizers"):
            kube.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": None}}, namespace)


def begin_with_first_names(tools: Tools, job: Job, manifest: Json) -> None:
    """Wait for the job's pods. The page shows the first names, such as moves-0-0: a job without them is made again.

    An operator that ends after a job's first status, before its first pods, leaves these names out.
    """
    while True:
        pods = job.kube.wait_list(
            "pods", job.namespace, bool, selector=job.workers, timeout=90, what=f"{job.name}: pods"
        )
        if f"{job.name}-0-0" in {pod["metadata"]["name"] for pod in pods}:
            return
        job.kube.delete("elasticjobs", job.name, job.namespace)
        job.kube.wait_gone("pods", job.namespace, job.selector, timeout=90)
        tools.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))


def wait_for_faults(kube: Kube, namespace: str) -> None:
    """Wait until each job has the fault that its section is about."""
    job = {name: Job(kube, namespace, name) for name in jobs()}
    job["stuck"].wait("Running")
    kube.patch("pods", "stuck-0-0", {"metadata": {"finalizers": [FINALIZER]}}, namespace)
    kube.delete("pods", "stuck-0-0", namespace)
    job["differs"].wait("Running")
    kube.delete("pods", "differs-1-0", namespace)
    job["trains"].wait("Running")
    kube.delete("pods", job["trains"].serving_store(), namespace)
    job["pending"].wait("Running", status="False", reason="Unschedulable")
    job["image"].wait("Running", status="False", reason="ImagePullFailed")
    job["fails"].wait("Failed")
    job["moves"].wait("Failed")
    job["hangs"].wait("Running")
    job["trains"].wait_store(1, timeout=60)
    job["trains"].wait_events("StoreLost")
    for name, successor in (("stuck", "stuck-0-1"), ("differs", "differs-1-1")):
        ready = lambda pods, pod=successor: any(p["metadata"]["name"] == pod and is_true(p, "Ready") for p in pods)  # noqa: E731
        job[name].wait_pods(ready, timeout=60, what=f"{successor} is ready")
    job["differs"].wait("Running")


def test_each_fault_and_its_commands(shell: Shell, kube: Kube, namespace: str) -> None:
    began = time.monotonic()
    wait_for_faults(kube, namespace)
    print(f"\n{time.monotonic() - began:6.1f} s  until each job had its fault")
    found: list[str] = []
    for block in blocks_to_run("troubleshooting"):
        words = {
            "bert": JOB_OF_SECTION[block.section],
            'progressTimeoutSeconds":300': f'progressTimeoutSeconds":{HANG_SECONDS}',
        }
        began = time.monotonic()
        if "reason=HangDetected" in block.text:
            Job(kube, namespace, "hangs").wait_events("HangDetected", timeout=90)
        if ".status.straggler" in block.text:
            named = lambda slow: "straggler" in slow.get("status", {})  # noqa: E731
            kube.wait("elasticjobs", "slow", namespace, named, timeout=300, what="the slow rank is reported")
            print(f"{time.monotonic() - began:6.1f} s  until the slow rank is reported")
        found += replace(shell, words=words).problems(block)
        print(f"{time.monotonic() - began:6.1f} s  {block}  {block.text.splitlines()[0]}")
    assert not found, "\n\n".join(found)
    Job(kube, namespace, "differs").wait_events("NoStepsReported")
    told = [event for event in kube.list("events", namespace) if event["reason"] == "NoStepsReported"]
    texts = {event["message"] for event in told if event["involvedObject"]["name"] == "differs"}
    assert {"call elasticjob.progress(step)" in text for text in texts} == {True}, "it reports no steps"
    files = ("moves.yaml", "events.txt", "pods.yaml", "job.log", "operator.log")
    assert [name for name in files if not (shell.folder / name).read_text().strip()] == []

"""A job trains, with the same result as a single process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster.jobs import Job, digits, kubectl, manifest
from support.cluster.kube import Json, Kube

Submit = Callable[[Json], Job]


def accuracy(text: str) -> float:
    found = re.findall(r"accuracy=([\d.]+)", text)
    assert found, f"no accuracy in:\n{text[-2000:]}"
    return float(found[-1])


def test_a_job_trains_as_well_as_a_single_process(
    submit: Submit, kube: Kube, cluster_dir: Path, namespace: str, shared_dir: str
) -> None:
    single = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "single"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "trainer",
                    "image": "elasticjob-digits:0.1.0",
                    "command": ["python3", "/app/train.py", "--epochs", "8", "--checkpoint", "/tmp/checkpoint"],
                }
            ],
        },
    }
    kube.create("pods", single, namespace)
    job = submit(digits("bert", shared_dir, "--epochs", "8", elasticPolicy={"minReplicas": 2, "maxReplicas": 3}))
    kubectl(cluster_dir, "wait", "--for=condition=Complete", "-n", namespace, "elasticjob/bert", "--timeout=180s",
            timeout=200)  # fmt: skip
    kube.wait("pods", "single", namespace, lambda p: p["status"]["phase"] == "Succeeded", timeout=120, what="single")
    alone = accuracy(kube.logs("single", namespace))
    assert alone > 0.9
    together = "".join(kube.logs(pod["metadata"]["name"], namespace) for pod in job.pods())
    assert accuracy(together) == pytest.approx(alone, abs=0.02)
    status = job.status()
    assert (status["phase"], status["restarts"], status["succeeded"]) == ("Succeeded", 0, 3)


def test_pods_have_the_logs_of_all_their_workers(submit: Submit, kube: Kube, namespace: str) -> None:
    script = "import os; print('i am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    job = submit(manifest("hello", ["python3", "-c", script], replicas=2, nprocPerNode=2, preload=[]))
    job.wait("Complete")
    logs = {p["metadata"]["name"]: kube.logs(p["metadata"]["name"], namespace) for p in job.pods()}
    assert sorted(logs) == ["hello-0-0", "hello-1-0"]
    for rank in range(4):
        assert f"[default{rank}]:i am {rank} of 4" in logs[f"hello-{rank // 2}-0"]


def test_a_restricted_pod_needs_no_volume(submit: Submit, kube: Kube, namespace: str) -> None:
    """A user without an entry in /etc/passwd, and a read-only root file system: there is no writable /tmp.

    The namespace enforces Pod Security `restricted`: store pods and the containers that the operator adds pass it too.
    """
    kube.patch("namespaces", namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    script = "import os, tempfile; print('user', os.getuid(), 'writes to', tempfile.gettempdir())"
    body = manifest("restricted", ["python3", "-c", script], replicas=2)
    pod = body["spec"]["template"]["spec"]
    pod["securityContext"] = {
        "runAsNonRoot": True, "runAsUser": 12345, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    pod["containers"][0]["securityContext"] = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    job = submit(body)
    job.wait("Complete")
    assert (job.status()["phase"], job.status()["restarts"]) == ("Succeeded", 0)
    for name in ("restricted-0-0", "restricted-1-0"):
        assert "user 12345 writes to /dev/shm" in kube.logs(name, namespace)


def test_status_has_the_reason_why_workers_start_by_exec(submit: Submit) -> None:
    flag = "--check-hash-based-pycs"
    job = submit(manifest("plain", ["python3", flag, "default", "-c", "import time; time.sleep(5)"], replicas=2))
    job.wait("Complete")
    assert (
        job.status()["warmFork"] == f"off on 2 of 2 pods: the fork server does not support the interpreter flag {flag}"
    )
    assert job.wait_events("WarmForkOff", "Completed").count("WarmForkOff") == 1


def test_a_finished_job_keeps_its_worker_pods_and_deletes_its_store(submit: Submit, kube: Kube) -> None:
    job = submit(manifest("tidy", ["python3", "-c", "print('done')"], replicas=1, preload=[]))
    job.wait("Complete")
    kube.wait_gone("pods", job.namespace, job.stores, timeout=60)
    kept = kube.wait(
        "pods",
        "tidy-0-0",
        job.namespace,
        lambda p: p["status"]["phase"] == "Succeeded",
        timeout=90,
        what="the worker pod succeeds",
    )
    assert "[default0]:done" in kube.logs(kept["metadata"]["name"], job.namespace)
    job.wait_events("Completed")


def test_deleting_a_job_deletes_its_children(submit: Submit, kube: Kube) -> None:
    job = submit(manifest("gone", ["python3", "-c", "import time; time.sleep(3600)"], replicas=2, preload=[]))
    job.wait("Running")
    kube.delete("elasticjobs", job.name, job.namespace)
    for plural in ("pods", "services", "secrets"):
        kube.wait_gone(plural, job.namespace, job.selector, timeout=90)

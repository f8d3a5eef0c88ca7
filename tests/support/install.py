"""Installs the operator from the chart, as a user does it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.kube import Json, Kube

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "elasticjob-system"
RELEASE = "elasticjob"


def helm(cluster_dir: Path, *arguments: str) -> str:
    """Run helm on the cluster; what it said, also as the error's text."""
    command = [str(cluster_dir / "bin/helm"), "--kubeconfig", str(cluster_dir / "kubeconfig"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise AssertionError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def install(kube: Kube, cluster_dir: Path) -> None:
    """Install or upgrade the chart and wait until the operator serves. The pods are new each time: the image's
    name says nothing of its content while one develops."""
    helm(cluster_dir, "upgrade", "--install", RELEASE, str(ROOT / "charts/elasticjob"), "--namespace", SYSTEM,
         "--create-namespace")  # fmt: skip
    for pod in kube.list("pods", SYSTEM):
        kube.delete("pods", pod["metadata"]["name"], SYSTEM)
    kube.wait("deployments", RELEASE, SYSTEM, _ready, timeout=120, what="the operator's Deployment is available")


def _ready(deployment: Json) -> bool:
    status = deployment.get("status", {})
    wanted = deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return bool(current and status.get("availableReplicas", 0) >= wanted and not status.get("unavailableReplicas"))

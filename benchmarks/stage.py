"""The test cluster with our images and our operator."""

from __future__ import annotations

from pathlib import Path

from cluster import verbs
from support.cluster.images import build_and_load
from support.cluster.install import SYSTEM, install
from support.cluster.kube import Kube

NAMESPACE = "bench"


def prepare() -> tuple[Kube, Path]:
    """Start the cluster, load the images, install the chart. Return the client and the cluster's folder."""
    folder = verbs.up().parent
    build_and_load()
    kube = Kube(folder / "kubeconfig")
    install(kube, folder)
    return kube, folder


def operator_pods(kube: Kube) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.list("pods", SYSTEM)]

"""The cluster with our images and our operator on it, as the demo has it."""

from __future__ import annotations

from pathlib import Path

from cluster import verbs
from support.images import build_and_load
from support.install import SYSTEM, install
from support.kube import Kube

NAMESPACE = "bench"


def prepare() -> tuple[Kube, Path]:
    """Cluster up, images loaded, chart installed; the client and the cluster's folder."""
    folder = verbs.up().parent
    build_and_load()
    kube = Kube(folder / "kubeconfig")
    install(kube, folder)
    return kube, folder


def fresh_namespace(kube: Kube) -> None:
    """An empty namespace, whatever an earlier run left behind."""
    if kube.find("namespaces", NAMESPACE):
        kube.delete("namespaces", NAMESPACE)
        while kube.find("namespaces", NAMESPACE):
            next((k for k, _ in kube.watch("namespaces", None, name=NAMESPACE, timeout=60) if k == "DELETED"), None)
    kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})


def operator_pods(kube: Kube) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.list("pods", SYSTEM)]

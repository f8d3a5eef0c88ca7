"""What tests, demo and benchmarks call: one cluster per machine, whichever kind it is.

Every verb raises ClusterError with one line for a person. Nodes are `node1`, `node2`, ...
"""

import os
from pathlib import Path
from typing import Protocol

from .bare import BareCluster
from .kind import KindCluster, docker_answers
from .layout import Layout


class Cluster(Protocol):
    """A running or startable cluster."""

    @property
    def kubeconfig(self) -> Path:
        """The admin's, for kubectl and every client."""

    def up(self, nodes: int | None, grace: float | None, replace: bool) -> None:
        """Returns when all nodes are Ready and DNS answers; on a running cluster it repairs and returns."""

    def down(self) -> None:
        """Removes the cluster and everything that it made."""

    def status(self) -> dict[str, str]:
        """Part → `Ready` or what is amiss; empty when nothing is up."""

    def load(self, archive: Path) -> None:
        """Brings the images of an OCI archive to every node that lacks them."""

    def kill(self, node: str) -> None:
        """Kubelet, containerd and every container of the node end by SIGKILL at once."""

    def cut(self, node: str) -> None:
        """The node's network link goes down; its processes live on."""

    def heal(self, node: str) -> None:
        """The link comes back."""

    def restart(self, node: str) -> None:
        """Starts a killed node again (stops a live one first) and waits until it is Ready."""

    def gpus(self, node: str, count: int) -> None:
        """The node advertises `count` of nvidia.com/gpu."""


def cluster(layout: Layout | None = None) -> Cluster:
    """The cluster of this clone of the repository."""
    where = layout or Layout.default()
    return KindCluster(where) if docker_answers() else BareCluster(where)


def up(nodes: int | None = None, grace: float | None = None, replace: bool | None = None) -> Path:
    """Starts the cluster (three nodes unless told otherwise) or repairs the running one; its kubeconfig.

    `grace`: seconds until a silent node counts as lost, instead of Kubernetes' own 50.
    `replace`: a live cluster of another clone is taken down; by default only where CI is set.
    """
    made = cluster()
    made.up(nodes, grace, bool(os.environ.get("CI")) if replace is None else replace)
    return made.kubeconfig


def down() -> None:
    cluster().down()


def status() -> dict[str, str]:
    return cluster().status()


def load(archive: Path) -> None:
    cluster().load(archive)


def kill(node: str) -> None:
    cluster().kill(node)


def cut(node: str) -> None:
    cluster().cut(node)


def heal(node: str) -> None:
    cluster().heal(node)


def restart(node: str) -> None:
    cluster().restart(node)


def gpus(node: str, count: int) -> None:
    cluster().gpus(node, count)

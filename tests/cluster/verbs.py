"""The verbs that tests, demo and benchmarks call, on the machine's one cluster.

Every verb raises ClusterError with a message of one line. Nodes are `node1`, `node2`, ...
"""

import os
from pathlib import Path
from typing import Protocol

from .bare import BareCluster
from .kind import KindCluster, docker_answers
from .layout import Layout


class Cluster(Protocol):
    """A cluster, running or not."""

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig."""

    def up(self, nodes: int | None, grace: float | None, replace: bool) -> None:
        """Start the cluster or repair the running one; return when all nodes are Ready and DNS answers."""

    def prepare(self) -> None:
        """Install and build what `up` needs."""

    def down(self) -> None:
        """Remove the cluster and everything that it created."""

    def status(self) -> dict[str, str]:
        """Return `Ready` or the problem of each component; empty when no cluster is up."""

    def load(self, archive: Path) -> None:
        """Load the images of an OCI archive on every node that lacks them."""

    def kill(self, node: str) -> None:
        """End kubelet, containerd and every container of the node by SIGKILL at once."""

    def cut(self, node: str) -> None:
        """Set the node's network link down; its processes keep running."""

    def heal(self, node: str) -> None:
        """Set the node's network link up again."""

    def restart(self, node: str) -> None:
        """Start a killed node (stop a live one first), and wait until it is Ready."""

    def gpus(self, node: str, count: int) -> None:
        """Let the node advertise `count` of nvidia.com/gpu."""


def cluster(layout: Layout | None = None) -> Cluster:
    """Return the cluster of this clone of the repository: kind's where Docker runs, else a bare one."""
    layout = layout or Layout.default()
    return KindCluster(layout) if docker_answers() else BareCluster(layout)


def up(nodes: int | None = None, grace: float | None = None, replace: bool | None = None) -> Path:
    """Start the cluster (three nodes by default) or repair the running one; return its kubeconfig.

    `grace`: seconds until a silent node counts as lost; None: the default of Kubernetes, 50.
    `replace`: whether to remove a running cluster of another clone; None: only where the variable CI is set.
    """
    started = cluster()
    started.up(nodes, grace, bool(os.environ.get("CI")) if replace is None else replace)
    return started.kubeconfig


def prepare() -> None:
    cluster().prepare()


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

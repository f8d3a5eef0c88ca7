"""Names, addresses and paths of the bare cluster.

Names that are visible machine-wide (network namespaces, links, cgroups) start with `ej`, so that a clean-up finds
everything that a cluster created. A machine can have one such cluster.
"""

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

BRIDGE = "ej0"
BRIDGE_MAC = "02:65:6a:00:00:01"
HOST_ADDRESS = "10.90.0.1"
NODE_NETWORK = "10.90.0.0/16"
POD_NETWORK = "10.91.0.0/16"
SERVICE_NETWORK = "10.92.0.0/16"
API_SERVICE = "10.92.0.1"
DNS_SERVICE = "10.92.0.10"
CONTROL = "ejcp"
CONTROL_ADDRESS = "10.90.0.2"
API_PORT = 6443
DNS_DOMAIN = "cluster.local"
MAX_NODES = 200


@dataclass(frozen=True)
class Node:
    """One node: a network namespace with its own containerd, kubelet and kube-proxy."""

    index: int
    """Number of the node, from 1 on."""
    home: Path
    """Folder for everything that this node writes."""

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def namespace(self) -> str:
        return f"ejn{self.index}"

    @property
    def link(self) -> str:
        """Name of the host's end of the node's veth pair."""
        return f"ejv{self.index}"

    @property
    def address(self) -> str:
        return f"10.90.0.{10 + self.index}"

    @property
    def pod_network(self) -> str:
        return f"10.91.{self.index}.0/24"

    @property
    def cgroup(self) -> str:
        """Root of every container's cgroup on this node."""
        return f"ejnode{self.index}"

    @property
    def socket(self) -> Path:
        return self.home / "containerd.sock"


@dataclass(frozen=True)
class Layout:
    """Folders of the cluster of one clone of the repository."""

    state: Path
    cache: Path

    @classmethod
    def default(cls) -> "Layout":
        """Return `.cluster` and `.cache` of the repository, or ELASTICJOB_STATE and ELASTICJOB_CACHE where set."""
        state = Path(os.environ.get("ELASTICJOB_STATE") or REPOSITORY / ".cluster")
        cache = Path(os.environ.get("ELASTICJOB_CACHE") or REPOSITORY / ".cache")
        return cls(state.absolute(), cache.absolute())

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def bin(self) -> Path:
        """Folder of links to kubectl and helm, for users."""
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def log(self) -> Path:
        return self.state / "log"

    def node(self, index: int) -> Node:
        return Node(index, self.state / f"node{index}")

    def nodes(self, count: int) -> list[Node]:
        return [self.node(index) for index in range(1, count + 1)]

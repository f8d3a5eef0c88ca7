"""The same verbs with kind, for machines with a Docker engine. CI has no Docker and does not run this module."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .layout import Layout

NAME = "elasticjob"
NETWORK = "kind"


def docker_answers() -> bool:
    """Return whether a Docker engine runs and kind is installed."""
    if shutil.which("docker") is None or shutil.which("kind") is None:
        return False
    return subprocess.run(["docker", "info"], check=False, capture_output=True).returncode == 0


def run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


@dataclass(frozen=True)
class KindCluster:
    """Implements the verbs with kind: a node is a Docker container; node1 is kind's first worker."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def prepare(self) -> None:
        """Nothing to do: kind fetches what it needs."""

    def up(self, nodes: int | None, grace: float | None, replace: bool) -> None:
        """Create the cluster unless it exists. `replace` has no effect: kind's cluster belongs to no clone."""
        if NAME in run("kind", "get", "clusters").split():
            return
        self.layout.state.mkdir(exist_ok=True)
        config = self.layout.state / "kind.yaml"
        manager = "{}" if grace is None else f"{{extraArgs: {{node-monitor-grace-period: {grace:g}s}}}}"
        patch = f"kind: ClusterConfiguration\\ncontrollerManager: {manager}\\n"
        workers = "- role: worker\n" * (nodes or 3)
        config.write_text(
            "kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\n"
            f'kubeadmConfigPatches: ["{patch}"]\nnodes:\n- role: control-plane\n{workers}'
        )
        where = ("--kubeconfig", str(self.kubeconfig), "--config", str(config))
        run("kind", "create", "cluster", "--name", NAME, "--wait", "120s", *where)

    def down(self) -> None:
        run("kind", "delete", "cluster", "--name", NAME, "--kubeconfig", str(self.kubeconfig))

    def status(self) -> dict[str, str]:
        lines = self.kubectl("get", "nodes", "--no-headers").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def load(self, archive: Path) -> None:
        run("kind", "load", "image-archive", str(archive), "--name", NAME)

    def kill(self, node: str) -> None:
        run("docker", "kill", container(node))

    def cut(self, node: str) -> None:
        run("docker", "network", "disconnect", NETWORK, container(node))

    def heal(self, node: str) -> None:
        run("docker", "network", "connect", NETWORK, container(node))

    def restart(self, node: str) -> None:
        run("docker", "restart", container(node))

    def gpus(self, node: str, count: int) -> None:
        resources = f'{{"nvidia.com/gpu": "{count}"}}'
        status = f'{{"status": {{"capacity": {resources}, "allocatable": {resources}}}}}'
        self.kubectl("patch", "node", container(node), "--subresource=status", "-p", status)

    def kubectl(self, *arguments: str) -> str:
        return run("kubectl", "--kubeconfig", str(self.kubeconfig), *arguments)


def container(node: str) -> str:
    """Return kind's container: `node1` → `elasticjob-worker`, `node2` → `elasticjob-worker2`, else the name itself."""
    number = node.removeprefix("node")
    return f"{NAME}-worker{'' if number == '1' else number}" if number.isdigit() else node

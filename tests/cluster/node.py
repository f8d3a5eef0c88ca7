"""One node: containerd, kubelet and kube-proxy in a network namespace, and the faults that tests inject."""

import json
import signal
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from . import cgroups, network, processes, shims
from .build import Programs
from .console import progress
from .control_plane import proxy_flags
from .errors import ClusterError
from .layout import DNS_DOMAIN, DNS_SERVICE, Layout, Node
from .pause import IMAGE as PAUSE_IMAGE
from .prerequisites import cni_folder
from .processes import Process
from .waiting import until

UNUSED_SNAPSHOTTERS = ("aufs", "btrfs", "devmapper", "zfs")
PARTS = ("containerd", "kube-proxy", "kubelet")
PLUGIN_SOCKET = Path("/var/lib/kubelet/device-plugins/kubelet.sock")
"""A kubelet removes it and listens there. Its path is fixed, so all kubelets of this machine share it."""
LOG_LINES = 30


@dataclass(frozen=True)
class Machine:
    """Starts and ends the programs of one node."""

    layout: Layout
    node: Node
    programs: Programs

    def processes(self) -> list[Process]:
        """Return its programs and containerd's shims. Processes in containers are found by cgroup."""
        prefix = f"{self.node.name}/"
        return [process for process in processes.find(self.layout.state) if process.part.startswith(prefix)]

    def missing(self) -> list[str]:
        """Return which of its three programs do not run."""
        present = {process.command for process in self.processes()}
        return [part for part in PARTS if part not in present]

    def launch(self, part: str, argv: list[str]) -> None:
        name = f"{self.node.name}/{part}"
        log = self.layout.log / f"{self.node.name}-{part}.log"
        processes.start(name, argv, state=self.layout.state, log=log, namespace=self.node.namespace)

    def start_runtime(self) -> None:
        """Write the configuration of the node, and start containerd."""
        home = self.node.home
        cgroups.create(self.node.cgroup)
        (home / "cni").mkdir(parents=True, exist_ok=True)
        (home / "containerd.toml").write_text(containerd_config(self.node))
        (home / "cni" / "10-elasticjob.conflist").write_text(json.dumps(cni_config(self.node)))
        (home / "kubelet.json").write_text(json.dumps(kubelet_config(self.layout, self.node)))
        self.launch("containerd", ["containerd", "--config", str(home / "containerd.toml")])

    def start_proxy(self) -> None:
        self.launch(
            "kube-proxy",
            [self.programs.path("kube-proxy"), *proxy_flags(self.layout, self.node.name, self.node.address)],
        )

    def await_runtime(self) -> None:
        """Wait until containerd answers, and import the sandbox image unless it has it."""
        until(f"containerd of {self.node.name}", self.runtime_problem, timeout=30)
        if PAUSE_IMAGE not in self.ctr("images", "list", "-q").split():
            self.ctr("images", "import", str(self.programs.pause_image))

    def runtime_problem(self) -> str | None:
        result = subprocess.run(self.ctr_command("version"), check=False, capture_output=True, text=True)
        return None if result.returncode == 0 else result.stderr.strip()[-200:]

    def ctr_command(self, *arguments: str) -> list[str]:
        return ["ctr", "--address", str(self.node.socket), "--namespace", "k8s.io", *arguments]

    def ctr(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run containerd's client `ctr` on this node and return its output; ClusterError with its error message."""
        command = self.ctr_command(*arguments)
        result = subprocess.run(command, check=False, capture_output=True, input=stdin)
        if result.returncode != 0:
            raise ClusterError(f"`{' '.join(command)}` failed: {result.stderr.decode().strip()}")
        return result.stdout.decode()

    def start_kubelet(self) -> None:
        """Start the kubelet, and wait until it has its plugin socket.

        Of two kubelets that start at the same time, one finds the other's socket there and ends.
        """
        home, before = self.node.home, identity(PLUGIN_SOCKET)
        flags = [
            f"--config={home / 'kubelet.json'}",
            f"--kubeconfig={self.layout.pki / self.node.name}.kubeconfig",
            f"--root-dir={home / 'kubelet'}",
            f"--cert-dir={home / 'kubelet-pki'}",
            f"--hostname-override={self.node.name}",
            f"--node-ip={self.node.address}",
        ]
        self.launch("kubelet", [self.programs.path("kubelet"), *flags])

        def problem() -> str | None:
            listens = identity(PLUGIN_SOCKET) not in (None, before)
            runs = f"{self.node.name}/kubelet" in {process.part for process in self.processes()}
            # `await_nodes` starts a kubelet again that has ended.
            return "it does not listen yet" if runs and not listens else None

        until(f"{PLUGIN_SOCKET} of the kubelet of {self.node.name}", problem, timeout=90)

    def print_logs(self) -> None:
        """Print which of its programs do not run, and the last lines of their logs."""
        progress(f"{self.node.name}: not running: {' '.join(self.missing()) or 'none'}")
        for part in PARTS:
            log = self.layout.log / f"{self.node.name}-{part}.log"
            for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else ():
                progress(f"{self.node.name} {part}: {line[:300]}")

    def kill(self) -> None:
        """Send SIGKILL to everything on the node at once; the kernel then closes its sockets."""
        shim_sockets = shims.sockets(self.node.home)
        # The kubelet first: it must not report that its containers died, as no kubelet of a dead node would.
        for process in sorted(self.processes(), key=lambda process: process.command != "kubelet"):
            processes.send(process, signal.SIGKILL)
        cgroups.kill(self.node.cgroup)
        processes.kill(self.processes)
        shims.remove(shim_sockets)

    def stop(self) -> None:
        """Send SIGTERM to kubelet, containerd and kube-proxy; containers and their shims keep running."""
        processes.terminate(lambda: [process for process in self.processes() if process.command in PARTS])

    def start(self) -> None:
        """Start a stopped or killed node and set its link up; its kubelet then joins the cluster."""
        network.plug(self.node, connected=True)
        self.start_runtime()
        self.start_proxy()
        self.await_runtime()
        self.start_kubelet()


def identity(path: Path) -> tuple[int, int] | None:
    """Return what tells the file at `path` from an earlier one of this path; None when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def containerd_config(node: Node) -> str:
    """Return containerd's configuration, in which every path is the node's and not the machine's."""
    home = node.home
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{home}/containerd"
state = "{home}/run"
disabled_plugins = {json.dumps([f"io.containerd.snapshotter.v1.{name}" for name in UNUSED_SNAPSHOTTERS])}

[grpc]
address = "{node.socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{home}/opt"

[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[{cri}.cni]
bin_dir = "{cni_folder()}"
conf_dir = "{home}/cni"

[{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
Root = "{home}/runc"
"""


def cni_config(node: Node) -> dict[str, Any]:
    """Return the network plugins' configuration: a veth pair per pod, and the node routes.

    A bridge would bypass kube-proxy's rules for replies between pods of one node, unless a kernel module is loaded.
    """
    addresses = {
        "type": "host-local",
        "dataDir": str(node.home / "addresses"),
        "ranges": [[{"subnet": node.pod_network}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    cable = {"type": "ptp", "ipMasq": False, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": f"ej-{node.name}", "plugins": [cable, ports]}


def kubelet_config(layout: Layout, node: Node) -> dict[str, Any]:
    """Return the KubeletConfiguration."""
    authority = {"clientCAFile": str(layout.pki / "ca.crt")}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": authority},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(layout.pki / f"{node.name}.key"),
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "clusterDomain": DNS_DOMAIN,
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": "/dev/null",
        "cgroupRoot": f"/{node.cgroup}",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "failCgroupV1": False,
        # All nodes share the machine's disk and memory: evict only when they are nearly exhausted.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "serializeImagePulls": False,
        "podLogsDir": str(node.home / "pod-logs"),
        "volumePluginDir": str(node.home / "volume-plugins"),
        "healthzPort": 10248,
    }


def ready_nodes(listing: dict[str, Any], since: float = 0.0) -> set[str]:
    """Return the names of Ready nodes in a NodeList, by heartbeats not older than `since` (Unix seconds)."""

    def ready(condition: dict[str, Any]) -> bool:
        heartbeat = datetime.fromisoformat(condition["lastHeartbeatTime"].replace("Z", "+00:00")).timestamp()
        return condition["type"] == "Ready" and condition["status"] == "True" and heartbeat >= int(since)

    return {
        item["metadata"]["name"]
        for item in listing["items"]
        if any(ready(condition) for condition in item.get("status", {}).get("conditions", []))
    }

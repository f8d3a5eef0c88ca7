"""A cluster without containers for its components: each is a process, and each node is a network namespace."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from . import build, control_plane, dns, gpus, images, leftovers, network, pki, prerequisites, processes
from .api import Api, ApiError
from .console import progress, stage
from .control_plane import ControlPlane
from .errors import ClusterError
from .layout import MAX_NODES, Layout, Node
from .node import Machine, ready_nodes
from .waiting import until

LOCK = Path("/run/elasticjob-cluster.lock")
"""One cluster per machine: names and addresses are machine-wide. The file holds the path of its state folder."""
READY_WITHIN = 90.0
"""Seconds that a component may take to start; usually all together take a tenth of it."""
JOIN_WITHIN = 30.0
"""Seconds until a node that is not Ready is started again; usually it takes 2."""


@dataclass(frozen=True)
class Settings:
    """The settings a cluster was started with, kept in its state folder."""

    nodes: int
    grace: float | None = None
    """Seconds until a silent node counts as lost; None: the default of Kubernetes."""
    gpus: dict[str, int] = field(default_factory=dict)
    """GPUs by node name."""
    kubernetes: str = build.DEFAULT.minor


@dataclass(frozen=True)
class BareCluster:
    """Implements the verbs with a bare cluster."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    @property
    def api(self) -> Api:
        return Api(self.layout.pki)

    def up(self, nodes: int | None, grace: float | None, replace: bool) -> None:
        if nodes is not None and not 1 <= nodes <= MAX_NODES:
            raise ClusterError(f"--nodes must be between 1 and {MAX_NODES}")
        prerequisites.check(self.layout)
        with exclusive(self.layout, replace):
            release, settings = build.find_release(), self.settings()
            if settings is not None and self.serves():
                if settings.kubernetes != release.minor:
                    raise ClusterError(f"a cluster of Kubernetes {settings.kubernetes} is up: take it down first")
                if nodes not in (None, settings.nodes):
                    raise ClusterError(f"a cluster of {settings.nodes} nodes is up: take it down first")
                return self.repair(settings)
            programs = build.programs(self.layout, release)
            began = time.monotonic()
            leftovers.clear(self.layout.state)
            self.start(programs, Settings(nodes or 3, grace, kubernetes=release.minor))
            progress(f"{time.monotonic() - began:5.1f} s  in total")
            return self.print_usage()

    def prepare(self) -> None:
        if os.geteuid() != 0:
            return progress("neither root nor Docker: this machine runs no cluster")
        prerequisites.check(self.layout)
        build.programs(self.layout)
        return None

    def start(self, programs: build.Programs, settings: Settings) -> None:
        """Start a cluster that can run pods."""
        layout, nodes = self.layout, self.layout.nodes(settings.nodes)
        plane = ControlPlane(layout, programs, build.find_release(settings.kubernetes), settings.grace)
        machines = [Machine(layout, node, programs) for node in nodes]
        with stage("network and certificates"):
            leftovers.record_machine(layout.state)
            network.check_free()
            network.create(nodes)
            pki.create(layout.pki, nodes, layout.kubeconfig)
        with stage("API server (containerd starts at the same time)"):
            plane.start_store()
            for machine in machines:
                machine.start_runtime()
            with ThreadPoolExecutor(len(machines)) as pool:
                list(pool.map(Machine.await_runtime, machines))
            until("the API server", lambda: control_plane.ready(self.api) or self.ended(), READY_WITHIN)
        for machine in machines:
            machine.start_kubelet()
        plane.start_controllers()
        dns.publish(self.api)
        plane.start_network(dns.write_corefile(layout.state / "Corefile", layout.pki / "coredns.kubeconfig"))
        for machine in machines:
            machine.start_proxy()
        with stage(f"{len(nodes)} nodes Ready"):
            self.await_nodes(machines)
        with stage("DNS and default ServiceAccount"):
            until("DNS", dns.problem, READY_WITHIN)
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            until("the default ServiceAccount", lambda: self.api.problem(account), READY_WITHIN)
        self.write_settings(settings)
        layout.bin.mkdir()
        for name in ("kubectl", "helm"):
            (layout.bin / name).symlink_to(programs.path(name))

    def await_nodes(self, machines: list[Machine]) -> None:
        """Wait until all nodes are Ready. A node whose programs end or hang is started again once, as by systemd."""
        nodes = [machine.node for machine in machines]
        try:
            until("the nodes", lambda: self.nodes_problem(nodes), JOIN_WITHIN)
        except ClusterError as error:
            progress(str(error))
            for machine in machines:
                if self.nodes_problem([machine.node]) is not None:
                    machine.print_logs()
                    machine.stop()
                    machine.start()
            until("the nodes", lambda: self.nodes_problem(nodes), READY_WITHIN)

    def repair(self, settings: Settings) -> None:
        """Restart nodes whose programs have ended or whose link is cut, when `up` finds a running cluster."""
        nodes = self.layout.nodes(settings.nodes)
        for machine in map(self.machine, nodes):
            if machine.missing() or not network.plugged(machine.node):
                progress(f"{machine.node.name}: a program has ended or the link is cut; restarting the node")
                self.restart(machine.node.name)
        until("the nodes", lambda: self.nodes_problem(nodes), READY_WITHIN)
        until("DNS", dns.problem, READY_WITHIN)
        progress(f"already up: {settings.nodes} nodes Ready")
        self.print_usage()

    def print_usage(self) -> None:
        progress(f"export KUBECONFIG={self.kubeconfig}")
        progress(f"kubectl and helm: {self.layout.bin}")

    def down(self) -> None:
        if os.geteuid() != 0:
            raise ClusterError("run as root")
        with exclusive(self.layout, replace=False):
            was_there = self.layout.state.exists() or bool(network.namespaces())
            leftovers.clear(self.layout.state)
            LOCK.unlink()
        progress("the cluster is down" if was_there else "no cluster was up")

    def status(self) -> dict[str, str]:
        """Return the state of `control plane`, `dns` and each node, by name; empty when no cluster is up."""
        settings = self.settings()
        if settings is None:
            return {}
        found = {"control plane": self.control_problem() or "Ready", "dns": dns.problem() or "Ready"}
        try:
            ready = ready_nodes(self.api.request("GET", "/api/v1/nodes"))
        except (ApiError, OSError):
            ready = set()
        for node in self.layout.nodes(settings.nodes):
            absent = self.machine(node).missing()
            link = "" if network.plugged(node) else ", cut off"
            dead = f", not running: {' '.join(absent)}" if absent else ""
            found[node.name] = ("Ready" if node.name in ready else "NotReady") + link + dead
        return found

    def load(self, archive: Path) -> None:
        machines = [self.machine(node) for node in self.layout.nodes(self.running().nodes)]
        images.load(archive, machines, self.layout.cache)

    def kill(self, node: str) -> None:
        self.machine(self.node(node)).kill()

    def cut(self, node: str) -> None:
        network.plug(self.node(node), connected=False)

    def heal(self, node: str) -> None:
        network.plug(self.node(node), connected=True)

    def restart(self, node: str) -> None:
        member = self.node(node)
        machine = self.machine(member)
        machine.stop()
        # Heartbeat times are whole seconds. In the next second, a heartbeat can only be the new kubelet's.
        time.sleep(1 - time.time() % 1)
        began = time.time()
        machine.start()
        until(node, lambda: self.nodes_problem([member], began), READY_WITHIN)
        if (count := self.running().gpus.get(node)) is not None:
            gpus.advertise(self.api, node, count)

    def gpus(self, node: str, count: int) -> None:
        self.node(node)
        gpus.advertise(self.api, node, count)
        settings = self.running()
        settings.gpus[node] = count
        self.write_settings(settings)

    def node(self, name: str) -> Node:
        nodes = {node.name: node for node in self.layout.nodes(self.running().nodes)}
        if name not in nodes:
            raise ClusterError(f"no node {name}: the nodes are {', '.join(nodes)}")
        return nodes[name]

    def machine(self, node: Node) -> Machine:
        release = build.find_release(self.running().kubernetes)
        return Machine(self.layout, node, build.programs(self.layout, release))

    def running(self) -> Settings:
        settings = self.settings()
        if settings is None:
            raise ClusterError("no cluster is up: `make cluster` starts one")
        return settings

    def settings(self) -> Settings | None:
        """Return the settings of the cluster; None unless an `up` has finished."""
        try:
            return Settings(**json.loads((self.layout.state / "cluster.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_settings(self, settings: Settings) -> None:
        target = self.layout.state / "cluster.json"
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps(settings.__dict__))
        partial.rename(target)

    def control_problem(self) -> str | None:
        """Return None while the control plane runs and the API server serves, else the problem."""
        return self.ended() or control_plane.ready(self.api)

    def serves(self) -> bool:
        """Return whether the control plane serves. Wait for one that is slow on a busy machine."""
        try:
            until("the API server", lambda: self.control_problem() if self.ended() is None else None, READY_WITHIN)
        except ClusterError as error:
            progress(f"{error}: starting a new cluster")
            return False
        if (problem := self.ended()) is not None:
            progress(f"{problem}: starting a new cluster")
        return problem is None

    def ended(self) -> str | None:
        """Return a message that names a component of the control plane that has ended; None when all run."""
        present = {process.command for process in processes.find(self.layout.state)}
        started = [part for part in control_plane.PARTS if (self.layout.log / f"{part}.log").exists()]
        # The kernel cuts the name of a program after 15 characters.
        if missing := [part for part in started if part[:15] not in present]:
            return f"{missing[0]} has ended, see {self.layout.log / missing[0]}.log"
        return None

    def nodes_problem(self, nodes: list[Node], since: float = 0.0) -> str | None:
        """Return None when all `nodes` are Ready by heartbeats since `since` (Unix seconds), else the problem."""
        try:
            ready = ready_nodes(self.api.request("GET", "/api/v1/nodes"), since)
        except (ApiError, OSError) as error:
            return str(error)
        late = [node.name for node in nodes if node.name not in ready]
        return f"not Ready: {', '.join(late)}" if late else None


@contextmanager
def exclusive(layout: Layout, replace: bool) -> Iterator[None]:
    """Hold the machine's lock. A cluster of another clone is an error, or removed where `replace` is set."""
    with locked() as lock:
        owner = lock.read().strip()
        if owner and Path(owner) != layout.state:
            remove_other(Path(owner), replace)
        lock.truncate(0)
        lock.write(f"{layout.state}\n")
        lock.flush()
        yield


def locked() -> TextIO:
    """Return the locked lock file, at its beginning; closing it releases the lock."""
    while True:
        lock = LOCK.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another command on this machine's cluster")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # `down` removes the file. A lock on a removed file excludes no other process: open the new file.
        if LOCK.exists() and LOCK.samefile(f"/proc/self/fd/{lock.fileno()}"):
            lock.seek(0)
            return lock
        lock.close()


def remove_other(owner: Path, replace: bool) -> None:
    """Remove the cluster of another clone with state folder `owner`; ClusterError where it runs, unless `replace`."""
    if processes.find(owner) and not replace:
        raise ClusterError(f"this machine already runs the cluster of {owner.parent}: take that down, or add --replace")
    progress(f"removing the cluster of {owner.parent}")
    leftovers.clear(owner)

"""The bare cluster: its verbs, and that it leaves the machine as it found it.

The tests of TestWholeLife take down the running cluster and leave a new one running.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster import bare, build, cgroups, leftovers, network, pause, prerequisites, processes, shims, verbs
from cluster.api import Api
from cluster.archives import chain_of, full_name, read_archive
from cluster.bare import BareCluster
from cluster.build import parse_version, programs
from cluster.control_plane import PARTS
from cluster.errors import ClusterError
from cluster.kind import container, docker_answers
from cluster.layout import CONTROL, Layout
from cluster.node import PARTS as NODE_PARTS
from cluster.node import ready_nodes
from cluster.waiting import until
from host import debian_packages
from host.errors import SetupError

SCRIPT = Path(verbs.__file__).with_name("cluster.py")
LAYOUT = Layout.default()
CLUSTER = BareCluster(LAYOUT)
PODS = "/api/v1/namespaces/default/pods"
HOST_FOLDERS = ("usr", "lib", "lib64", "bin")
"""The sandbox image has no shell: test pods mount these folders of the machine."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or docker_answers(), reason="the bare cluster needs root")
on_cluster = pytest.mark.cluster


def command(*arguments: str, kubernetes: str = "") -> subprocess.CompletedProcess[str]:
    """Run cluster.py as a user would, with this version of Kubernetes or that of the environment."""
    environ = {**os.environ, **({build.CHOICE: kubernetes} if kubernetes else {})}
    line = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(line, check=False, capture_output=True, text=True, env=environ)


def kubectl(*arguments: str) -> str:
    line = [str(LAYOUT.bin / "kubectl"), "--kubeconfig", str(LAYOUT.kubeconfig), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def api() -> Api:
    """The API server of the running cluster."""
    verbs.up()
    return CLUSTER.api


@pytest.fixture
def pods(api: Api) -> Iterator[list[str]]:
    """Names of the pods that a test creates; they are deleted after it."""
    names: list[str] = []
    yield names
    for name in names:
        api.request("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def run_pod(
    api: Api, pods: list[str], name: str, script: str, node: str, within: float = 30, **container_fields: Any
) -> str:
    """Start a pod that runs a shell script on a node; return its address when it runs."""
    folders = [folder for folder in HOST_FOLDERS if Path("/", folder).exists()]
    main = {
        "name": "main",
        "image": pause.IMAGE,
        "command": ["/bin/sh", "-c", script],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": folder, "mountPath": f"/{folder}", "readOnly": True} for folder in folders],
        **container_fields,
    }
    volumes = [{"name": folder, "hostPath": {"path": f"/{folder}"}} for folder in folders]
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": [main], "volumes": volumes}
    labels = {"test": name}
    metadata = {"name": name, "labels": labels}
    api.request("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    pods.append(name)
    until(f"pod {name}", lambda: None if phase(api, name) == "Running" else phase(api, name), timeout=within)
    return str(api.request("GET", f"{PODS}/{name}")["status"]["podIP"])


def phase(api: Api, name: str) -> str:
    return str(api.request("GET", f"{PODS}/{name}")["status"]["phase"])


ECHO = "exec python3 -c '{}'".format(
    'import socketserver as s; H=type("H",(s.BaseRequestHandler,),{"handle":lambda h:'
    '[h.request.sendall(d) for d in iter(lambda:h.request.recv(99),b"")]});'
    's.ThreadingTCPServer(("0.0.0.0",7),H).serve_forever()'
)
"""A script that serves echo on port 7."""


def connect(address: str) -> socket.socket:
    """Return a connection to the echo server at `address`, which may still be starting."""
    found: list[socket.socket] = []

    def attempt() -> str | None:
        try:
            found.append(socket.create_connection((address, 7), timeout=1))
        except OSError as error:
            return str(error)
        return None

    until(f"echo at {address}", attempt, timeout=20)
    return found[0]


def machine() -> dict[str, set[str]]:
    """Return everything that a cluster could leave behind on this machine."""

    def lines(*line: str) -> set[str]:
        output = subprocess.run(line, check=True, capture_output=True, text=True).stdout
        return {entry for entry in output.splitlines() if not entry.startswith("#")}

    trees = [folder for folder, _, _ in os.walk(cgroups.ROOT)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    listed = {str(entry) for folder in leftovers.SHARED if folder.is_dir() for entry in (folder, *folder.iterdir())}
    return {
        "processes": {f"{process.pid} {process.command}" for process in processes.find()},
        "network namespaces": set(network.namespaces()),
        "links": {entry.name for entry in Path("/sys/class/net").iterdir()},
        "routes": lines("ip", "-4", "route", "show", "table", "all"),
        "packet filter": lines("iptables-save"),
        "mounts": {line.split()[4] for line in mounts},
        "cgroups": {folder for folder in trees if "ejnode" in folder},
        "shared folders": listed,
        "sysctls": {f"{name}={Path('/proc/sys', name).read_text()}" for name in leftovers.SYSCTLS},
        "state": {str(LAYOUT.state)} if LAYOUT.state.exists() else set(),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digits:1", "docker.io/library/digits:1"),
        ("someone/digits:1", "docker.io/someone/digits:1"),
        ("localhost/digits:1", "localhost/digits:1"),
        ("registry:5000/digits:1", "registry:5000/digits:1"),
        ("ghcr.io/someone/digits:1", "ghcr.io/someone/digits:1"),
    ],
)
def test_full_name(name: str, expected: str) -> None:
    assert full_name(name) == expected


def test_chain_ids_are_those_of_the_image_specification() -> None:
    assert chain_of([]) == ()
    assert chain_of(["sha256:a"]) == ("sha256:a",)
    # printf 'sha256:a sha256:b' | sha256sum
    second = "sha256:970a948bffa8de94d6e22d747ba8c95030e6e546909f98f54e99a13005e173a8"
    assert chain_of(["sha256:a", "sha256:b"]) == ("sha256:a", second)


@pytest.mark.parametrize(
    ("text", "expected"), [("go1.24.1", (1, 24)), ("1.19~2", (1, 19)), ("go1.26", (1, 26)), ("devel", (0,))]
)
def test_parse_version(text: str, expected: tuple[int, ...]) -> None:
    assert parse_version(text) == expected


@pytest.mark.parametrize(
    ("node", "expected"), [("node1", "elasticjob-worker"), ("node3", "elasticjob-worker3"), ("x", "x")]
)
def test_kind_container(node: str, expected: str) -> None:
    assert container(node) == expected


@pytest.mark.parametrize(
    ("status", "heartbeat", "since", "expected"),
    [
        ("True", "2026-01-01T00:00:10Z", 0, {"a"}),
        ("True", "2026-01-01T00:00:10Z", 1767225610.0, {"a"}),
        ("True", "2026-01-01T00:00:10Z", 1767225611.0, set()),
        ("False", "2026-01-01T00:00:10Z", 0, set()),
    ],
)
def test_ready_nodes(status: str, heartbeat: str, since: float, expected: set[str]) -> None:
    condition = {"type": "Ready", "status": status, "lastHeartbeatTime": heartbeat}
    item = {"metadata": {"name": "a"}, "status": {"conditions": [condition]}}
    assert ready_nodes({"items": [item]}, since) == expected


def test_archive_without_images_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "empty.tar"
    target.write_bytes(pause.tar({"index.json": json.dumps({"manifests": []}).encode()}))
    with pytest.raises(ClusterError, match="names no image"):
        read_archive(target)
    with pytest.raises(ClusterError, match="not an OCI image archive"):
        read_archive(Path(__file__))


def test_up_needs_root(tmp_path: Path) -> None:
    line = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, str(SCRIPT), "up"]
    environment = {**os.environ, "ELASTICJOB_STATE": str(tmp_path / "state")}
    result = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("run as root, for instance `sudo make cluster`")


def test_a_folder_that_no_cluster_made_is_kept(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.touch()
    with pytest.raises(ClusterError, match="holds files that no cluster created"):
        leftovers.remove_folder(tmp_path)
    assert precious.exists()
    (tmp_path / leftovers.RECORD).touch()
    leftovers.remove_folder(tmp_path)
    assert not tmp_path.exists()


def test_lock_follows_a_removed_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bare, "LOCK", tmp_path / "lock")
    first = bare.locked()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(bare.locked)
        bare.LOCK.unlink()
        first.close()
        with second.result(timeout=10) as lock:
            assert bare.LOCK.samefile(f"/proc/self/fd/{lock.fileno()}")


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ({"runc"}, ["runc"]),
        ({"containerd", "ctr", "ip"}, ["containerd", "iproute2"]),
        ({"ptp"}, ["containernetworking-plugins"]),
        (set[str](), []),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, absent: set[str], expected: list[str]) -> None:
    monkeypatch.setattr(prerequisites, "program", lambda name: None if name in absent else f"/usr/bin/{name}")
    monkeypatch.setattr(prerequisites, "cni_folder", lambda: None if "ptp" in absent else Path("/"))
    assert prerequisites.missing_packages() == expected


def test_missing_package_without_apt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "program", lambda name: None if name == "runc" else name)
    monkeypatch.setattr(debian_packages, "has_apt", lambda: False)
    with pytest.raises(SetupError, match="missing: runc"):
        prerequisites.check(LAYOUT)


def test_missing_cgroup_controllers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    with pytest.raises(ClusterError, match="no cgroup controller cpu, cpuset, memory, pids"):
        prerequisites.check(LAYOUT)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert cgroups.problem() is None


def test_a_path_too_long_for_sockets_is_an_error() -> None:
    with pytest.raises(ClusterError, match="set ELASTICJOB_STATE to a path of <= 63 bytes"):
        prerequisites.check(Layout(Path("/" + "x" * 64), LAYOUT.cache))


def test_cgroups_of_version_2_get_their_controllers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    cgroups.create("ejnode1")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory +pids"
    assert cgroups.roots("ejnode*") == [tmp_path / "ejnode1"]
    cgroups.remove("ejnode1")
    assert cgroups.roots("ejnode*") == []


def test_a_too_old_go_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\necho local\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(build, "debian_go", lambda: (1, 19))
    with pytest.raises(ClusterError, match=r"needs Go 1\.24 or newer"):
        build.go_command()
    go.write_text("#!/bin/sh\necho go1.21.0\necho auto\n")
    assert build.go_command() == str(go)


class TestWholeLife:
    """Starting and removing a cluster, also after interruptions."""

    pytestmark = pytest.mark.cluster

    def test_down_leaves_nothing_behind(self) -> None:
        verbs.down()
        before = machine()
        verbs.up()
        names: list[str] = []
        for node in ("node1", "node2", "node3"):
            run_pod(CLUSTER.api, names, f"left-{node}", ECHO, node)
        programs_and_shims = len(PARTS) + 3 * (len(NODE_PARTS) + 1)
        assert (len(before["processes"]), len(machine()["processes"])) == (0, programs_and_shims)
        verbs.kill("node2")
        verbs.cut("node3")
        # A process that resembles the cluster's processes, but has no mark.
        with subprocess.Popen(["sleep", "60"], env={"STATE": str(LAYOUT.state)}, cwd=LAYOUT.state.parent) as unrelated:
            verbs.down()
            assert unrelated.poll() is None
            unrelated.kill()
        after = machine()
        assert {kind: after[kind] ^ before[kind] for kind in before} == {kind: set() for kind in before}

    @pytest.mark.parametrize("moment", ["ejcp", "etcd", "kube-apiserver", "kubelet"])
    def test_the_remains_of_a_killed_up_are_removed(self, moment: str) -> None:
        verbs.down()
        before = machine()
        with subprocess.Popen([sys.executable, SCRIPT, "up"], stderr=subprocess.DEVNULL) as starting:

            def begun() -> str | None:
                seen = {process.command for process in processes.find(LAYOUT.state)}
                return None if moment in seen | set(network.namespaces()) else str(seen)

            until(f"{moment} of a starting cluster", begun, timeout=60, interval=0.005)
            starting.send_signal(signal.SIGKILL)
        if moment == "kubelet":  # here `up` starts over the remains, else `down` removes them
            assert command("up").returncode == 0
            assert set(verbs.status().values()) == {"Ready"}
        assert command("down").returncode == 0
        after = machine()
        assert {kind: after[kind] ^ before[kind] for kind in before} == {kind: set() for kind in before}

    def test_up_after_a_crash_of_the_machine_starts_a_new_cluster(self) -> None:
        verbs.up()
        processes.kill(lambda: processes.find(LAYOUT.state))
        assert verbs.status()["control plane"] != "Ready"
        result = command("up")
        assert (result.returncode, "has ended" in result.stderr, "already" in result.stderr) == (0, True, False)
        assert set(verbs.status().values()) == {"Ready"}

    def test_concurrent_and_repeated_ups_start_one_cluster(self) -> None:
        verbs.down()
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda _: command("up"), range(2)))
        assert [result.returncode for result in results] == [0, 0]
        assert sorted("already up: 3 nodes Ready" in result.stderr for result in results) == [False, True]
        assert "already up" in command("up").stderr
        other = command("up", "--nodes", "2")
        assert (other.returncode, other.stderr.count("take it down first")) == (1, 1)
        (minor,) = {build.OLDEST.minor, build.NEWEST.minor} - {build.find_release().minor}
        for chosen, expected in ((minor, "is up: take it down first"), ("1.2", "write 1.34 or 1.37")):
            found = command("up", kubernetes=chosen)
            assert (found.returncode, expected in found.stderr) == (1, True), found.stderr

    def test_up_from_another_clone_is_an_error(self) -> None:
        verbs.up()
        # pytest's own temporary folder may be too long a path for the cluster's Unix sockets.
        with tempfile.TemporaryDirectory(prefix="clone-") as folder:
            environment = {**os.environ, "ELASTICJOB_STATE": f"{folder}/s", "ELASTICJOB_CACHE": str(LAYOUT.cache)}
            environment.pop("CI", None)
            line = [sys.executable, str(SCRIPT), "up"]
            result = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
        assert (result.returncode, str(LAYOUT.state.parent) in result.stderr) == (1, True)
        assert set(verbs.status().values()) == {"Ready"}

    def test_up_from_the_cache_builds_nothing_and_starts_each_kubelet_once(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        programs(LAYOUT)
        verbs.down()
        verbs.up()
        output = capfd.readouterr().err
        assert "3 nodes Ready" in output
        assert not [line for line in output.splitlines() if "build" in line or "not ready within" in line]
        logs = [(LAYOUT.log / f"node{number}-kubelet.log").read_text() for number in (1, 2, 3)]
        assert [log.count("Started kubelet") for log in logs] == [1, 1, 1]


@on_cluster
class TestNodes:
    """Faults of nodes, restarts and GPUs."""

    def test_kill_closes_sockets_and_restart_restarts_pods(self, api: Api, pods: list[str]) -> None:
        address = run_pod(api, pods, "killed", ECHO, "node2")
        shim_sockets = shims.sockets(LAYOUT.node(2).home)
        assert any(map(Path.exists, shim_sockets))
        with connect(address) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"  # a connection that nobody has accepted would be reset
            verbs.kill("node2")
            assert connection.recv(1) == b""
        assert cgroups.pids("ejnode2") == set()
        assert CLUSTER.machine(LAYOUT.node(2)).processes() == []
        assert "not running: containerd kube-proxy kubelet" in verbs.status()["node2"]
        assert not any(map(Path.exists, shim_sockets))
        verbs.restart("node2")

        def again() -> str | None:
            status = api.request("GET", f"{PODS}/killed")["status"]
            restarts = status["containerStatuses"][0]["restartCount"]
            ready = status["containerStatuses"][0]["ready"]
            return None if (restarts, ready) == (1, True) else f"{restarts} restarts, ready: {ready}"

        until("the pod on the restarted node", again, timeout=60)
        connect(api.request("GET", f"{PODS}/killed")["status"]["podIP"]).close()
        assert set(verbs.status().values()) == {"Ready"}

    def test_restart_of_a_live_node_keeps_its_containers(self, api: Api, pods: list[str]) -> None:
        address = run_pod(api, pods, "kept", ECHO, "node1")
        with connect(address) as connection:
            verbs.restart("node1")
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
        assert api.request("GET", f"{PODS}/kept")["status"]["containerStatuses"][0]["restartCount"] == 0

    def test_cut_and_heal(self, api: Api, pods: list[str]) -> None:
        address = run_pod(api, pods, "cut", ECHO, "node3")
        with connect(address) as connection:
            verbs.cut("node3")
            try:
                assert verbs.status()["node3"].endswith("cut off")
                connection.settimeout(0.5)
                connection.sendall(b"x")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                assert cgroups.pids("ejnode3")
            finally:
                verbs.heal("node3")
            connection.settimeout(20)
            assert connection.recv(1) == b"x"

    def test_unknown_node(self, api: Api) -> None:
        assert command("node", "kill", "node9").stderr == "cluster: no node node9: the nodes are node1, node2, node3\n"

    def test_gpus_survive_a_restart_of_the_node(self, api: Api, pods: list[str]) -> None:
        verbs.gpus("node2", 4)
        try:
            verbs.restart("node2")
            limits = {"limits": {"nvidia.com/gpu": "2"}}
            run_pod(api, pods, "gpu-first", "sleep 1000", "node2", resources=limits)
            run_pod(api, pods, "gpu-second", "sleep 1000", "node2", resources=limits)
            with pytest.raises(ClusterError, match="Pending"):
                run_pod(api, pods, "gpu-third", "sleep 1000", "node2", within=5, resources=limits)
        finally:
            verbs.gpus("node2", 0)


@on_cluster
class TestServices:
    """Networks, DNS, logs and images."""

    def test_host_and_pods_reach_services(self, api: Api, pods: list[str]) -> None:
        run_pod(api, pods, "echo", ECHO, "node1")
        spec = {"selector": {"test": "echo"}, "ports": [{"port": 7}]}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "echo"}, "spec": spec}
        address = api.request("POST", "/api/v1/namespaces/default/services", body)["spec"]["clusterIP"]
        try:
            connect(address).close()
            ask = (
                'import socket; s=socket.create_connection(("echo",7),5); s.sendall(b"hello"); '
                "print(s.recv(9).decode(), flush=True); print(socket.gethostbyaddr(s.getpeername()[0])[0], flush=True)"
            )
            for node in ("node1", "node3"):
                run_pod(api, pods, f"asks-{node}", f"python3 -c '{ask}'; sleep 1000", node)

                def answered(name: str = f"asks-{node}") -> str | None:
                    output = kubectl("logs", name)
                    return None if output == "hello\necho.default.svc.cluster.local\n" else output

                until(f"the echo on {node}", answered, timeout=20)
        finally:
            api.request("DELETE", "/api/v1/namespaces/default/services/echo")

    def test_exec_and_port_forward(self, api: Api, pods: list[str]) -> None:
        run_pod(api, pods, "reached", ECHO, "node2")
        assert kubectl("exec", "reached", "--", "/bin/sh", "-c", "echo $((6*7))") == "42\n"
        line = [
            str(LAYOUT.bin / "kubectl"),
            "--kubeconfig",
            str(LAYOUT.kubeconfig),
            "port-forward",
            "pod/reached",
            ":7",
        ]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as forward:
            assert forward.stdout is not None
            port = int(forward.stdout.readline().split("127.0.0.1:")[1].split()[0])
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
            forward.terminate()

    def test_connections_out_of_the_cluster_fail_at_once(self, api: Api, pods: list[str]) -> None:
        attempt = (
            'import socket\ntry: socket.create_connection(("192.0.2.1",80),20)\nexcept OSError as e: print(e.errno)'
        )
        run_pod(api, pods, "out", f"python3 -c '{attempt}'; sleep 1000", "node1")
        until("the refusal", lambda: None if kubectl("logs", "out").strip().isdigit() else "nothing", timeout=10)

    def test_memory_limit_kills(self, api: Api, pods: list[str]) -> None:
        script = "python3 -c 'bytearray(200*1024*1024)'; echo $?; sleep 1000"
        run_pod(api, pods, "greedy", script, "node1", resources={"limits": {"memory": "64Mi"}})
        until("the kill", lambda: None if "137" in kubectl("logs", "greedy") else "not yet", timeout=20)

    def test_load_loads_an_image_on_every_node_once(self, api: Api, pods: list[str], tmp_path: Path) -> None:
        archive = tmp_path / "image.tar"
        name = f"loaded:{time.time_ns()}"
        pause.write_image(programs(LAYOUT).folder / "pause", archive, name)
        first, second = command("load", str(archive)), command("load", str(archive))
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert "loading on 3 nodes" in first.stderr
        assert "already on every node" in second.stderr
        fields: dict[str, Any] = {"image": name, "imagePullPolicy": "Never", "command": ["/pause"]}
        for node in ("node1", "node2", "node3"):
            run_pod(api, pods, f"loaded-{node}", "", node, **fields)

    def test_admission_policies_are_served(self, api: Api) -> None:
        group = api.request("GET", "/apis/admissionregistration.k8s.io/v1")
        assert "validatingadmissionpolicies" in {resource["name"] for resource in group["resources"]}

    def test_the_only_warnings_are_those_of_the_machine(self, api: Api) -> None:
        """Nodes of an idle cluster have only warnings that the machine causes.

        CgroupV1 warns of cgroup version 1. SystemOOM concerns pods of earlier clusters: a starting kubelet reads the
        whole kernel log.
        """
        events = api.request("GET", "/api/v1/namespaces/default/events")["items"]
        warnings = {
            event["reason"]
            for event in events
            if event["type"] == "Warning" and event["involvedObject"]["kind"] == "Node"
        }
        assert warnings <= {"CgroupV1", "Rebooted", "InvalidDiskCapacity", "SystemOOM"}


def test_the_control_namespace_is_not_a_nodes() -> None:
    assert CONTROL not in {node.namespace for node in LAYOUT.nodes(200)}

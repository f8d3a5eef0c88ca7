"""What the NetworkPolicies of jobs admit and refuse, where they are enforced."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support.cluster.install import SYSTEM, install
from support.cluster.jobs import DIGITS, Job, kill_worker, kubectl, slow_digits
from support.cluster.kube import Json, Kube, is_true
from support.cluster.kubectl import REPOSITORY
from support.cluster.logbook import LogBook

Submit = Callable[[Json], Job]
Follow = Callable[[Job], LogBook]
STORE_PORT = 29400
TWO = {"minReplicas": 2, "maxReplicas": 2}
DENY_ALL = {"metadata": {"name": "deny-all"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
LISTENING = """
import json
def ports():
    for family in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{family}").readlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, _, port = local.partition(":")
            if state == "0A" and not address.endswith("7F"):
                yield int(port, 16)
print(json.dumps(sorted(set(ports()))))
"""
CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(target):
    try:
        socket.create_connection(target, timeout=2).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps([target for target, answer in zip(targets, pool.map(reached, targets)) if answer]))
"""
Target = tuple[str, int]


@dataclass(frozen=True)
class Pod:
    """A pod in which tests run Python."""

    cluster: Path
    namespace: str
    name: str

    def python(self, script: str, *arguments: str) -> str:
        command = ["exec", "-n", self.namespace, self.name, "--", "python3", "-c", script, *arguments]
        return kubectl(self.cluster, *command)

    def reaches(self, targets: set[Target]) -> set[Target]:
        """Return those of the targets that accept a connection of this pod."""
        return {(host, port) for host, port in json.loads(self.python(CONNECT, json.dumps(sorted(targets))))}


@pytest.fixture
def other_namespace(kube: Kube) -> Iterator[str]:
    name = f"outside-{uuid.uuid4().hex[:5]}"
    kube.create("namespaces", {"metadata": {"name": name}})
    yield name
    kube.delete("namespaces", name)


@pytest.fixture
def start_pod(kube: Kube, cluster_dir: Path) -> Callable[[str, Json], Pod]:
    """Start a pod with these labels that only waits."""

    def start(namespace: str, labels: Json) -> Pod:
        command = ["python3", "-c", "import signal; signal.pause()"]
        spec = {"containers": [{"name": "c", "image": DIGITS, "command": command}], "terminationGracePeriodSeconds": 0}
        kube.create("pods", {"metadata": {"name": "outsider", "labels": labels}, "spec": spec}, namespace)
        ready = lambda pod: is_true(pod, "Ready")  # noqa: E731
        kube.wait("pods", "outsider", namespace, ready, timeout=60, what="the outsider is Ready")
        return Pod(cluster_dir, namespace, "outsider")

    return start


def workers(job: Job, cluster: Path) -> list[Pod]:
    return [Pod(cluster, job.namespace, name) for name in job.running()]


def targets_of(job: Job, cluster: Path) -> set[Target]:
    """Return where the pods of a training job listen: the store, by its Service and by its pod, and all workers."""
    stores = {store["status"]["podIP"] for store in job.pods(job.stores)}
    service = job.kube.get("services", f"{job.name}-rdzv", job.namespace)["spec"]["clusterIP"]
    found = {(host, STORE_PORT) for host in {service, *stores}}
    for pod in workers(job, cluster):
        ports = json.loads(pod.python(LISTENING))
        assert ports, f"{pod.name} listens on no port"
        address = job.kube.get("pods", pod.name, job.namespace)["status"]["podIP"]
        found |= {(address, port) for port in ports}
    return found


def train(submit: Submit, follow: Follow, body: Json) -> Job:
    """Start a job, and wait until it trains and has both stores."""
    job = submit(body)
    follow(job).wait_step(5, timeout=240)
    job.wait_standby_store(timeout=60)
    return job


def test_only_pods_of_a_job_reach_its_ports_unless_it_has_no_policy(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, kube: Kube, namespace: str,
    other_namespace: str, start_pod: Callable[[str, Json], Pod],
) -> None:  # fmt: skip
    bodies = [slow_digits(name, f"{shared_dir}/{name}", 60, elasticPolicy=TWO) for name in ("open", "closed")]
    bodies[0]["spec"]["networkIsolation"] = False
    open_job, closed_job = [train(submit, follow, body) for body in bodies]
    reachable, hidden = targets_of(open_job, cluster_dir), targets_of(closed_job, cluster_dir)
    members = workers(closed_job, cluster_dir)
    outsiders = [  # with labels that do not admit them: the job's without its UID, the operator's in another namespace
        start_pod(namespace, {"elasticjob.dev/job-name": "closed", "elasticjob.dev/role": "worker"}),
        start_pod(other_namespace, {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/component": "operator"}),
        workers(open_job, cluster_dir)[0],
    ]
    for pod in outsiders:
        assert (pod.reaches(reachable), pod.reaches(hidden)) == (reachable, set()), pod
    for pod in members:
        assert pod.reaches(hidden) == hidden
    (operator, *_) = (Pod(cluster_dir, SYSTEM, pod["metadata"]["name"]) for pod in kube.list("pods", SYSTEM))
    assert operator.reaches(hidden) == {(host, port) for host, port in hidden if port == STORE_PORT}
    for job in (open_job, closed_job):
        job.wait("Complete", timeout=240)
        assert job.status()["restarts"] == 0


def test_a_job_trains_where_only_the_policies_of_the_docs_allow_connections(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, kube: Kube, namespace: str
) -> None:
    kube.create("networkpolicies", DENY_ALL, namespace)
    job = submit(slow_digits("denied", shared_dir, 40, elasticPolicy=TWO))
    run = lambda found: [pod["status"].get("phase") for pod in found] == ["Running", "Running"]  # noqa: E731
    job.wait_pods(run, timeout=60, what="two pods run")
    job.wait("RendezvousReady")
    store = {(pod["status"]["podIP"], STORE_PORT) for pod in job.pods(job.stores)}
    assert [pod.reaches(store) for pod in workers(job, cluster_dir)] == [set(), set()]
    assert job.status().get("rendezvousRound", 0) == 0
    kube.create("networkpolicies", documented_policy("egress-of-jobs"), namespace)
    book = follow(job)
    book.wait_step(5, timeout=120)
    round_ = job.wait_status(worldSize=2)["status"]["rendezvousRound"]
    kill_worker(cluster_dir, job, "denied-1-0")
    job.wait_world(2, after=round_, timeout=60)
    job.wait_standby_store(timeout=60)
    kube.delete("pods", "denied-rdzv-0", namespace)
    job.wait_store(1, timeout=60)
    book.wait_steps_after(time.time(), timeout=60)
    job.wait("Complete", timeout=240)
    assert job.status()["restarts"] == 1


@pytest.fixture
def system_denies_all(kube: Kube, cluster_dir: Path) -> Iterator[None]:
    """Deny all connections in the operator's namespace but those of the documented policy, and start its pods again."""
    policies = [DENY_ALL, documented_policy("egress-of-operator")]
    for policy in policies:
        kube.create("networkpolicies", policy, SYSTEM)
    try:
        install(kube, cluster_dir)
        yield
    finally:
        for policy in policies:
            kube.delete("networkpolicies", policy["metadata"]["name"], SYSTEM)


@pytest.mark.usefixtures("system_denies_all")
def test_the_operator_follows_a_job_from_a_namespace_that_denies_all(
    submit: Submit, follow: Follow, shared_dir: str, cluster_dir: Path, kube: Kube
) -> None:
    job = train(submit, follow, slow_digits("followed", shared_dir, 25, elasticPolicy=TWO))
    (operator, *_) = (Pod(cluster_dir, SYSTEM, pod["metadata"]["name"]) for pod in kube.list("pods", SYSTEM))
    targets = targets_of(job, cluster_dir)
    assert operator.reaches(targets) == {(host, port) for host, port in targets if port == STORE_PORT}
    # The store sends both to the operator.
    round_ = job.wait_status(worldSize=2)["status"]["rendezvousRound"]
    kill_worker(cluster_dir, job, "followed-1-0")
    job.wait_world(2, after=round_, timeout=60)
    job.wait("Complete", timeout=240)
    assert job.status()["restarts"] == 1


def documented_policy(name: str) -> Json:
    """Return the NetworkPolicy of this name that docs/operate/security.md asks users to apply."""
    parts = (REPOSITORY / "docs/operate/security.md").read_text().split("```yaml\n")[1:]
    policies: list[Json] = [yaml.safe_load(part.partition("```")[0]) for part in parts]
    (found,) = (policy for policy in policies if policy["metadata"]["name"] == name)
    return found

"""Manifests of ElasticJobs for tests, and a handle to watch a job."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.cluster.kube import ApiError, Json, Kube, condition, is_true
from support.cluster.kubectl import run_tool

DIGITS = "elasticjob-digits:0.1.0"
ROOM: Json = {"requests": {"cpu": "1100m", "memory": "64Mi"}}
"""Resources of which each machine of the test cluster has enough for one pod."""


def manifest(name: str, command: list[str], **spec: Any) -> Json:
    """Return an ElasticJob whose trainer runs `command` in the digits image.

    `image`, `resources`, `volumes` and `mounts` go into the pod template, everything else into spec.
    """
    container: Json = {
        "name": "trainer",
        "image": spec.pop("image", DIGITS),
        "command": command,
        "resources": spec.pop("resources", {"requests": {"cpu": "50m", "memory": "256Mi"}}),
    }
    if mounts := spec.pop("mounts", None):
        container["volumeMounts"] = mounts
    pod: Json = {"containers": [container]}
    if volumes := spec.pop("volumes", None):
        pod["volumes"] = volumes
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {**spec, "template": {"spec": pod}},
    }


STEP_SECONDS = 1.5
"""Seconds that a step of `slow_digits` takes at least, until `end_soon`."""
STEPS_OF_AN_EPOCH = 16
RESTARTABLE_STEPS = 400
LONG = 240.0
"""Seconds for which a job trains whose test ends it by `end_soon`: a replaced pod on a busy machine took over 60."""
EXAMPLES = Path(__file__).parents[3] / "examples"
_UNTIL_END_SOON = """
import os, runpy, sys, time
sleep, folder = time.sleep, sys.argv[1]
time.sleep = lambda seconds: None if os.path.exists(folder + "/end-soon") else sleep(seconds)
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def hurried(folder: str, script: str, *arguments: str) -> list[str]:
    """Return the command that runs a script, whose sleeps end once `end_soon` marks this folder of its container."""
    return ["python3", "-c", _UNTIL_END_SOON, folder, script, *arguments]


def end_soon(directory: str) -> None:
    """Let a `hurried` script go on without its sleeps, such as that of each step: a test has seen enough of it."""
    (Path(directory) / "end-soon").touch()


def slow_digits(name: str, directory: str, seconds: float = LONG, **spec: Any) -> Json:
    """Return the digits example. It trains for this time or somewhat longer, but for `end_soon`; mostly it sleeps."""
    epochs = str(math.ceil(seconds / STEP_SECONDS / STEPS_OF_AN_EPOCH))
    body = digits(name, directory, "--epochs", epochs, "--step-delay", str(STEP_SECONDS), **spec)
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["command"] = hurried("/checkpoint", *container["command"][1:])
    return body


def slow_restartable(kube: Kube, namespace: str, directory: str) -> Json:
    """Return examples/restartable.yaml, and make its ConfigMap. It trains for LONG, but for `end_soon`."""
    script = (EXAMPLES / "restartable/train.py").read_text()
    kube.create("configmaps", {"metadata": {"name": "restartable-example"}, "data": {"train.py": script}}, namespace)
    body: Json = yaml.safe_load((EXAMPLES / "restartable.yaml").read_text())
    pod = body["spec"]["template"]["spec"]
    container = pod["containers"][0]
    arguments = (f"--steps={RESTARTABLE_STEPS}", f"--step-delay={LONG / RESTARTABLE_STEPS}", "--path=/shared/state")
    container["command"] = hurried("/shared", "/scripts/train.py", *arguments)
    container["volumeMounts"].append({"name": "shared", "mountPath": "/shared"})
    pod["volumes"].append({"name": "shared", "hostPath": {"path": directory, "type": "Directory"}})
    return body


def digits(name: str, directory: str, *arguments: str, **spec: Any) -> Json:
    """Return the digits example. It writes checkpoints to a directory that all nodes of a test cluster share."""
    command = ["python3", "/app/train.py", "--checkpoint", "/checkpoint", *arguments]
    return manifest(
        name,
        command,
        volumes=[{"name": "checkpoint", "hostPath": {"path": directory, "type": "DirectoryOrCreate"}}],
        mounts=[{"name": "checkpoint", "mountPath": "/checkpoint"}],
        **spec,
    )


@dataclass(frozen=True)
class Job:
    """A job on the cluster."""

    kube: Kube
    namespace: str
    name: str

    @property
    def selector(self) -> str:
        return f"elasticjob.dev/job-name={self.name}"

    @property
    def workers(self) -> str:
        return f"{self.selector},elasticjob.dev/role=worker"

    @property
    def stores(self) -> str:
        return f"{self.selector},elasticjob.dev/role=store"

    def read(self) -> Json:
        return self.kube.get("elasticjobs", self.name, self.namespace)

    def status(self) -> Json:
        status: Json = self.read().get("status", {})
        return status

    def wait(self, kind: str, *, status: str = "True", reason: str = "", timeout: float = 120) -> Json:
        """Wait for a condition and return the job at that time. Fail at once if the job ends differently."""

        def reached(job: Json) -> bool:
            current = condition(job, kind)
            if current.get("status") == status and reason in ("", current.get("reason")):
                return True
            for end in ({"Complete", "Failed"} - {kind}) if kind in ("Complete", "Failed") else ():
                assert not is_true(job, end), f"{self.name} is {end}: {json.dumps(job['status'], indent=1)}"
            return False

        what = f"{self.name}: {kind}={status}" + (f" ({reason})" if reason else "")
        return self.kube.wait("elasticjobs", self.name, self.namespace, reached, timeout=timeout, what=what)

    def wait_status(self, timeout: float = 120, **fields: object) -> Json:
        """Wait until these status fields have these values."""

        def reached(job: Json) -> bool:
            status = job.get("status", {})
            return all(status.get(k) == v for k, v in fields.items())

        return self.kube.wait(
            "elasticjobs", self.name, self.namespace, reached, timeout=timeout, what=f"{self.name}: {fields}"
        )

    def wait_world(self, size: int, *, after: int, timeout: float) -> Json:
        """Wait until a world of `size` workers has formed after rendezvous round `after`, and return the status."""

        def reached(job: Json) -> bool:
            status = job.get("status", {})
            return bool(status.get("rendezvousRound", 0) > after and status.get("worldSize") == size)

        what = f"{self.name}: a world of {size} after round {after}"
        job = self.kube.wait("elasticjobs", self.name, self.namespace, reached, timeout=timeout, what=what)
        status: Json = job["status"]
        return status

    def serving_store(self) -> str:
        """Return the name of the store pod that status names: not that of the standby store."""
        return f"{self.name}-rdzv-{self.status()['rendezvous']['incarnation']}"

    def wait_store(self, incarnation: int, *, timeout: float) -> None:
        """Wait until a store of this incarnation or a newer one serves."""

        def reached(job: Json) -> bool:
            serving = int(job.get("status", {}).get("rendezvous", {}).get("incarnation", -1))
            return serving >= incarnation and is_true(job, "RendezvousReady")

        what = f"{self.name}: store {incarnation} serves"
        self.kube.wait("elasticjobs", self.name, self.namespace, reached, timeout=timeout, what=what)

    def wait_standby_store(self, *, timeout: float) -> str:
        """Wait until the pod of the standby store is Ready, and return its name."""

        def named(job: Json) -> bool:
            return "standby" in job.get("status", {}).get("rendezvous", {})

        what = f"{self.name}: a standby store"
        job = self.kube.wait("elasticjobs", self.name, self.namespace, named, timeout=timeout, what=what)
        name = f"{self.name}-rdzv-{job['status']['rendezvous']['standby']}"
        ready = lambda pod: is_true(pod, "Ready")  # noqa: E731
        self.kube.wait("pods", name, self.namespace, ready, timeout=timeout, what=f"{name} is Ready")
        return name

    def pods(self, selector: str = "") -> list[Json]:
        """Return the worker pods (or those of a selector) that are not being deleted, by name."""
        return _not_deleted(self.kube.list("pods", self.namespace, selector or self.workers))

    def wait_pods(
        self, until: Callable[[list[Json]], bool], selector: str = "", *, timeout: float, what: str
    ) -> list[Json]:
        """Wait until the worker pods (or those of a selector) that are not being deleted meet a condition."""
        reached = lambda pods: until(_not_deleted(pods))  # noqa: E731
        chosen = selector or self.workers
        found = self.kube.wait_list("pods", self.namespace, reached, selector=chosen, timeout=timeout, what=what)
        return _not_deleted(found)

    def running(self) -> list[str]:
        return [p["metadata"]["name"] for p in self.pods() if p["status"].get("phase") == "Running"]

    def node_of(self, pod: str) -> str:
        node: str = self.kube.get("pods", pod, self.namespace)["spec"]["nodeName"]
        return node

    def wait_events(self, *reasons: str, timeout: float = 90) -> list[str]:
        """Wait until the job has Events with these reasons, and return the reasons of all of its Events.

        The operator records them after the status that they are about.
        """

        def recorded(events: list[Json]) -> bool:
            return set(reasons) <= set(self._reasons(events))

        what = f"{self.name}: Events {', '.join(reasons)}"
        return self._reasons(self.kube.wait_list("events", self.namespace, recorded, timeout=timeout, what=what))

    def _reasons(self, events: list[Json]) -> list[str]:
        return [e["reason"] for e in events if e["involvedObject"].get("name") == self.name]


def _not_deleted(pods: list[Json]) -> list[Json]:
    """Return the pods that are not being deleted, by name."""
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))


def kubectl(cluster: Path, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
    """Run kubectl as a user does and return its stdout. Raise AssertionError with its output on failure."""
    done = run_tool(cluster / "bin/kubectl", cluster / "kubeconfig", arguments, stdin=stdin, timeout=timeout)
    return done.stdout


def kill_worker(cluster: Path, job: Job, pod: str) -> float:
    """Send SIGKILL to the newest worker of a pod and return the time (Unix seconds).

    Workers are the children of the pod's first process that lead a session of their own.
    """
    script = (
        "import os,signal,time\n"
        "def leads(p):\n"
        "    try:\n"
        "        stat=open(f'/proc/{p}/stat').read().rpartition(')')[2].split()\n"
        "    except OSError:\n"
        "        return False\n"  # the process has ended
        "    return stat[1]=='1' and int(stat[3])==p!=os.getpid()\n"
        "os.kill(max(p for p in map(int,filter(str.isdigit,os.listdir('/proc'))) if leads(p)),signal.SIGKILL)\n"
        "print(time.time())\n"
    )
    output = kubectl(cluster, "exec", "-n", job.namespace, pod, "-c", "trainer", "--", "python3", "-c", script)
    return float(output)


def diagnosis(kube: Kube, namespace: str, system: str) -> str:
    """Return jobs, pods, Events and the logs of operator, store and agents, to explain a failed test."""
    parts = []
    for plural in ("elasticjobs", "pods"):
        for item in kube.list(plural, namespace):
            parts.append(f"--- {plural} {item['metadata']['name']}\n{json.dumps(item.get('status'), indent=1)}")
    for event in kube.list("events", namespace):
        parts.append(f"event {event['involvedObject'].get('name')} {event['reason']}: {event.get('message', '')}")
    for where in (namespace, system):
        for pod in kube.list("pods", where):
            for container in pod["spec"]["containers"]:
                name = pod["metadata"]["name"]
                try:
                    log = kube.logs(name, where, container["name"], tailLines="120")
                except (OSError, ApiError) as error:
                    log = f"no log: {error}"
                parts.append(f"--- log {where}/{name} {container['name']}\n{log}")
    return "\n".join(parts)

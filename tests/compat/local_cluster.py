"""One job without Kubernetes: its pods are processes on loopback addresses, its operators are processes of `peer`."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compat.versions import environment_of, peer_command
from elasticjob._runtime.agent.processes import die_with_parent
from elasticjob._runtime.contract.names import Env, Label, Role
from elasticjob_operator.model.cluster.raw import timestamp

Json = dict[str, Any]
POLL = 0.05
TIMEOUT = 60.0
"""Seconds between reconciles, and for which a test waits."""
TRAIN = """
import inspect, os, pathlib, sys, time
import elasticjob

folder, rank, step = pathlib.Path(sys.argv[1]), os.environ["RANK"], 0
total = {"total": 100000} if "total" in inspect.signature(elasticjob.progress).parameters else {}
with open(folder / f"rank-{rank}", "a") as steps:
    while not (folder / "done").exists():
        time.sleep(0.02)
        step += 1
        print(os.getpid(), step, file=steps, flush=True)
        elasticjob.progress(step, **total)
"""
"""Training: writes its process id and each step to a file of its rank, until the file `done` exists."""


class OperatorProcess:
    """An operator of one version. It decides; `LocalCluster` does what it has decided."""

    def __init__(self, code: Path, image: str) -> None:
        self._process = subprocess.Popen(
            peer_command("operator", image), env=environment_of(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, preexec_fn=die_with_parent,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=10)

    def reconcile(self, request: Json) -> Json:
        """Send the job and its pods, and return the operator's decision."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the operator has failed"
        answer: Json = json.loads(line)
        return answer


@dataclass
class LocalCluster:
    """The API server and the kubelets of one job. `code` is that of the job's agents and stores."""

    code: Path
    folder: Path
    job: Json = field(default_factory=dict)
    pods: dict[str, Json] = field(default_factory=dict)
    children: Json = field(default_factory=lambda: {"secret": None, "nodes": False, "store": None})
    """The Secret; whether the workers' Service exists; the incarnation that the store's Service selects, or None."""
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _listeners: dict[int, socket.socket] = field(default_factory=dict)
    """By incarnation of the store. All have one port, on addresses of their own."""

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        script = self.folder / "train.py"
        script.write_text(TRAIN)
        self._listeners[0] = socket.create_server((_store_address(0), 0))
        command = [sys.executable, str(script), str(self.folder)]
        self.job = {
            "metadata": {"namespace": "ns", "name": "job", "uid": "job-uid", "generation": 1},
            "spec": {
                "replicas": 2,
                "elasticPolicy": {"minReplicas": 1, "maxReplicas": 2},
                "rendezvous": {"port": self._listeners[0].getsockname()[1]},
                "preload": [],
                # An operator of 0.1.0 makes neither.
                "disruptionBudget": False,
                "networkIsolation": False,
                "template": {"spec": {"containers": [{"name": "main", "image": "user:1", "command": command}]}},
            },
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for listener in self._listeners.values():
            listener.close()

    @property
    def status(self) -> Json:
        found: Json = self.job.get("status", {})
        return found

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """Return the process and the step of each step of a rank, in all rounds."""
        path = self.folder / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(step)) for pid, step in (line.split() for line in lines if line.count(" ") == 1)]

    def workers(self) -> list[int]:
        """Return the process of each rank's newest worker."""
        return [self.steps(rank)[-1][0] for rank in range(2)]

    def delete(self, name: str) -> None:
        """Delete a pod as `kubectl delete` does."""
        pod = self.pods[name]
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = timestamp(time.time() + pod["spec"]["terminationGracePeriodSeconds"])
            self._processes[name].send_signal(signal.SIGTERM)

    def reconcile(self, operator: OperatorProcess, until: Callable[[Json], object], what: str) -> list[str]:
        """Reconcile until this holds for the operator's decision; return the types of its actions."""
        deadline, actions = time.monotonic() + TIMEOUT, list[str]()
        while True:
            self._record_ends()
            decided = operator.reconcile(self._request())
            if decided["status"] is not None:
                self.job["status"] = decided["status"]
            for action in decided["actions"]:
                actions.append(action["type"])
                self._execute(action)
            if until(decided):
                return actions
            assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT} s\n{self._describe()}"
            time.sleep(POLL)

    def _request(self) -> Json:
        by_role: dict[str, list[Json]] = {Role.WORKER.value: [], Role.STORE.value: []}
        for pod in self.pods.values():
            by_role[pod["metadata"]["labels"][Label.ROLE]].append(pod)
        workers, stores = by_role.values()
        return {"job": self.job, "workers": workers, "stores": stores, "children": self.children}

    def _execute(self, action: Json) -> None:
        match action["type"]:
            case "CreateSecret":
                self.children["secret"] = action["object"]
            case "CreateNodesService":
                self.children["nodes"] = True
            case "CreateStoreService" | "UpdateStoreService":
                self.children["store"] = action["incarnation"]
            case "DeleteService":
                self.children |= {"nodes": False} if action["name"] == "job" else {"store": None}
            case "CreateStore" | "CreateStandbyStore" | "CreateWorker":
                self._create(action["object"])
            case "DeletePod":
                self.delete(action["name"])
            case other:
                raise AssertionError(f"unexpected action {other}")

    # ---- pods

    def _create(self, pod: Json) -> None:
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        store = labels[Label.ROLE] == Role.STORE.value
        container, incarnation = pod["spec"]["containers"][0], int(labels[Label.INCARNATION])
        address = _store_address(incarnation) if store else "127.0.0.1"
        environ = os.environ | {item["name"]: self._value(item, address) for item in container["env"]}
        environ.pop("PYTHONPATH", None)
        inherited: tuple[int, ...] = ()
        if store:
            state = self.folder / name
            state.mkdir()
            environ[Env.STATE_DIR] = str(state)
            if incarnation not in self._listeners:
                self._listeners[incarnation] = socket.create_server((address, self._port))
            inherited = (self._listeners[incarnation].fileno(),)
            environ[Env.LISTEN_FD] = str(inherited[0])
        else:
            environ[Env.STORE_ENDPOINT] = f"{_store_address(self.children['store'])}:{self._port}"
            environ[Env.TERMINATION_LOG] = str(self._termination_log(name))
        arguments = container["command"][container["command"].index("store" if store else "agent") :]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(self.code / "agent/elasticjob"), *arguments],
                env=environ, stdout=log, stderr=log, pass_fds=inherited, preexec_fn=die_with_parent,
            )  # fmt: skip
        pod["metadata"] |= {"uid": name, "creationTimestamp": timestamp(time.time())}
        pod["spec"]["nodeName"] = f"node-of-{name}"
        running = {"name": container["name"], "state": {"running": {"startedAt": timestamp(time.time())}}}
        pod["status"] = {
            "phase": "Running", "podIP": address, "containerStatuses": [running],
            "conditions": [{"type": "Ready", "status": "True"}],
        }  # fmt: skip
        self.pods[name] = pod

    def _value(self, item: Json, address: str) -> str:
        """Return the value of a variable, as a kubelet resolves it."""
        source = item.get("valueFrom", {})
        if "secretKeyRef" in source:
            data = self.children["secret"]["data"][source["secretKeyRef"]["key"]]
            return base64.b64decode(data).decode()
        return address if "fieldRef" in source else str(item["value"])

    @property
    def _port(self) -> int:
        port: int = self.job["spec"]["rendezvous"]["port"]
        return port

    def _termination_log(self, pod: str) -> Path:
        return self.folder / f"{pod}.json"

    def _record_ends(self) -> None:
        """Report the pods whose process has ended; those that were deleted are gone then."""
        for name, pod in [*self.pods.items()]:
            code = self._processes[name].poll()
            if code is None:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                del self.pods[name]
                continue
            log = self._termination_log(name)
            terminated = {
                "exitCode": code if code >= 0 else 128 - code,
                "reason": "Completed" if code == 0 else "Error",
                "message": log.read_text() if log.exists() else "",
                "finishedAt": timestamp(time.time()),
            }
            (container,) = pod["status"]["containerStatuses"]
            if "terminated" not in container["state"]:
                container["state"] = {"terminated": terminated}
                pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"

    def _describe(self) -> str:
        logs = (f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join((json.dumps(self.status, indent=1), *logs))


def _store_address(incarnation: int) -> str:
    return f"127.0.1.{incarnation + 1}"

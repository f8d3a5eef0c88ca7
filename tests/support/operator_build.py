"""Jobs, pods and reports for tests of the operator, as raw JSON where the API server would give raw JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from elasticjob.contract import codec
from elasticjob.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    NodeReport,
    Outcome,
    Report,
    RoundEnded,
    RoundPhase,
    Termination,
)
from elasticjob.contract.names import Label, Role, RoundId
from elasticjob_operator.model.observed import Child, Children, Job, LinkView, Observed, parse_job
from elasticjob_operator.model.pods import AVOIDED_NODES, Pod, parse_pod
from elasticjob_operator.model.raw import timestamp

NOW = 1_800_000_000.0
UID = "11111111-2222-3333-4444-555555555555"
IMAGE = "elasticjob:test"
CHILDREN = Children(Child("s", True), Child("n", True), Child("r", True, incarnation=0))

Raw = dict[str, Any]


def raw_job(*, status: Raw | None = None, generation: int = 1, **spec: Any) -> Raw:
    """A job `bert` of fixed size 2 unless `spec` says otherwise."""
    template = {"spec": {"containers": [{"name": "main", "image": "user:1", "command": ["python", "train.py"]}]}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "namespace": "ns", "name": "bert", "uid": UID, "generation": generation, "resourceVersion": "1",
        },
        "spec": {"replicas": 2, "template": template} | spec,
        "status": status or {},
    }  # fmt: skip


def job(**more: Any) -> Job:
    return parse_job(raw_job(**more))


def elastic(low: int, high: int, replicas: int | None = None) -> Raw:
    """Fields of an elastic spec."""
    fields: Raw = {"elasticPolicy": {"minReplicas": low, "maxReplicas": high}, "replicas": replicas}
    return {name: value for name, value in fields.items() if value is not None}


def status(**more: Any) -> Raw:
    """Status of a job of two nodes that has been started."""
    return {
        "incarnations": "0,0",
        "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0},
        "targetReplicas": 2,
        "executionAttempts": 1,
        "runtimeImage": IMAGE,
        "startTime": timestamp(NOW - 100),
    } | more


def condition(kind: str, value: bool = True, reason: str = "R", at: float = NOW - 50) -> Raw:
    return {
        "type": kind, "status": str(value), "reason": reason, "message": "m", "lastTransitionTime": timestamp(at),
    }  # fmt: skip


def raw_pod(index: int, incarnation: int = 0, *, role: Role = Role.WORKER, node: str = "n1", **more: Any) -> Raw:
    """A running pod; `phase`, `deleting`, `conditions`, `container` (its status), `avoids`, `created` change it."""
    store = role is Role.STORE
    name = f"bert-rdzv-{incarnation}" if store else f"bert-{index}-{incarnation}"
    meta: Raw = {
        "namespace": "ns", "name": name, "uid": f"uid-{name}",
        "creationTimestamp": timestamp(more.get("created", NOW - 60)),
        "labels": {
            Label.JOB_NAME: "bert", Label.JOB_UID: UID, Label.ROLE: role.value, Label.INDEX: str(index),
            Label.INCARNATION: str(incarnation),
        },
    }  # fmt: skip
    if "deleting" in more:
        meta["deletionTimestamp"] = timestamp(more["deleting"])
    if "avoids" in more:
        meta["annotations"] = {AVOIDED_NODES: more["avoids"]}
    phase = more.get("phase", "Running")
    container = {"name": "main", "image": "user:1", "state": {"running": {}}} | more.get("container", {})
    return {
        "metadata": meta,
        "spec": {
            "nodeName": node, "containers": [{"name": "main"}], "restartPolicy": "Always" if store else "Never",
        },
        "status": {
            "phase": phase, "podIP": f"10.0.{index}.{incarnation}", "containerStatuses": [container],
            "conditions": [
                {"type": "Ready", "status": "True" if phase == "Running" else "False"}, *more.get("conditions", []),
            ],
        },
    }  # fmt: skip


def worker(index: int, incarnation: int = 0, **more: Any) -> Pod:
    return parse_pod(raw_pod(index, incarnation, **more))


def store(incarnation: int = 0, **more: Any) -> Pod:
    return parse_pod(raw_pod(0, incarnation, role=Role.STORE, **more))


def ended(exit_code: int, reason: str = "Error", said: Termination | str | None = None) -> Raw:
    """Arguments of a pod whose trainer has ended."""
    message = codec.dumps(said).decode() if isinstance(said, Termination) else said or ""
    terminated = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": timestamp(NOW - 1)}
    return {"phase": "Failed" if exit_code else "Succeeded", "container": {"state": {"terminated": terminated}}}


def declared(outcome: Outcome, failure: Failure | None = None) -> Termination:
    return Termination(outcome, "because", RoundId(1, 0, 1), "", failure)


def unschedulable(message: str = "0/3 nodes are available.") -> Raw:
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "node": "", "conditions": [found]}


def failure(pod: str = "bert-0-0", **more: Any) -> Failure:
    base = Failure(FailureClass.USER_ERROR, pod, NOW - 2, rank=0, exit_code=1, exception="ValueError", message="bad")
    return replace(base, **more)


def round_ended(n: int, reason: EndReason = EndReason.WORKER_FAILED, **more: Any) -> RoundEnded:
    charged = reason is EndReason.WORKER_FAILED
    base = RoundEnded(
        RoundId(1, 0, n), reason, "a message", charged, NOW - 2, 2, failure() if charged else None
    )  # fmt: skip
    return replace(base, **more)


def report(*pods: Pod, formed_at: float = NOW - 30, **more: Any) -> Report:
    """A round of all `pods` runs."""
    nodes = tuple(NodeReport(p.index, p.incarnation, p.name, True, True) for p in pods)
    base = Report(
        incarnation=0, phase=RoundPhase.RUNNING, reason="", round=RoundId(1, 0, 1), rounds=1, world_size=len(pods),
        formed_at=formed_at, nodes=nodes, active=len(pods),
    )  # fmt: skip
    return replace(base, **more)


def gathering(*pods: Pod, **more: Any) -> Report:
    """No round runs; `pods` are here."""
    none = {"phase": RoundPhase.GATHERING, "round": None, "world_size": 0, "active": 0, "formed_at": 0.0, "rounds": 0}
    return replace(report(*pods), **(none | more))


def link(told: Report | None = None, *, since: float = NOW - 20, **lost: float) -> LinkView:
    return LinkView(
        connected=True, since=since, report=told, lost_pods={n.replace("_", "-"): at for n, at in lost.items()}
    )


def steady(*, workers: tuple[Pod, ...] | None = None, told: Report | None = None, **status_more: Any) -> Observed:
    """Two nodes that train, a store that serves."""
    pods = workers if workers is not None else (worker(0), worker(1))
    told = told or report(*(p for p in pods if p.running))
    return Observed(
        job=job(status=status(**status_more)), workers=pods, stores=(store(),), children=CHILDREN, link=link(told)
    )


def dumped(value: Any) -> str:
    """For comparing JSON data."""
    return json.dumps(value, sort_keys=True)

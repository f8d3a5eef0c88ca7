"""Jobs, pods and reports for tests of the operator. Objects of the API server are built as raw JSON, then parsed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import (
    AgentReport,
    EndReason,
    Failure,
    FailureClass,
    InRound,
    Outcome,
    Report,
    RoundEnded,
    RoundPhase,
    Termination,
)
from elasticjob._runtime.contract.names import Label, Role, RoundId
from elasticjob._runtime.local.manifest.job_schema import find_mistakes
from elasticjob_operator.model.cluster.pods import AVOIDED_NODES, FAILED_STARTS, Pod, parse_pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.job.guarded import guarded_digest
from elasticjob_operator.model.observed import Child, Children, Job, LinkView, Observed, parse_job
from elasticjob_operator.plan import Plan, plan
from support.common.read_yaml import read_yaml
from support.operator.condition_table import documented_reason, undocumented

NOW = 1_800_000_000.0
UID = "11111111-2222-3333-4444-555555555555"
IMAGE = "elasticjob:test"
CHILDREN = Children("bert-rdzv", Child("n", True), Child("r", True, incarnation=0))

REPOSITORY = Path(__file__).resolve().parents[3]
STATUS_SCHEMA = read_yaml(REPOSITORY / "crds/elasticjobs.in.yaml")["spec"]["versions"][0]["schema"]["openAPIV3Schema"][
    "properties"
]["status"]

Raw = dict[str, Any]
_TEMPLATE: Raw = {"spec": {"containers": [{"name": "main", "image": "user:1", "command": ["python", "train.py"]}]}}


def raw_job(*, status: Raw | None = None, generation: int = 1, **spec: Any) -> Raw:
    """Return the job `bert`, of fixed size 2 and without a NetworkPolicy unless `spec` overrides it."""
    if status and status.get("executionAttempts"):
        # The operator writes it with the number of the execution.
        made_from = guarded_digest({"networkIsolation": False, "template": _TEMPLATE} | spec)
        status = {**status, "guardedFields": {"execution": status["executionAttempts"], "digest": made_from}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "namespace": "ns", "name": "bert", "uid": UID, "generation": generation, "resourceVersion": "1",
        },
        "spec": {"replicas": 2, "networkIsolation": False, "template": deepcopy(_TEMPLATE)} | spec,
        "status": status or {},
    }  # fmt: skip


def job(**more: Any) -> Job:
    """Return the parsed job; arguments as for `raw_job`."""
    return parse_job(raw_job(**more))


def elastic(low: int, high: int, replicas: int | None = None) -> Raw:
    """Return the fields of an elastic spec."""
    fields: Raw = {"elasticPolicy": {"minReplicas": low, "maxReplicas": high}, "replicas": replicas}
    return {name: value for name, value in fields.items() if value is not None}


def status(**more: Any) -> Raw:
    """Return the status of a job of two nodes that has been started."""
    return {
        "incarnations": "0,0",
        "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0, "standby": 1},
        "targetReplicas": 2,
        "executionAttempts": 1,
        "runtimeImage": IMAGE,
        "startTime": timestamp(NOW - 100),
    } | more


def condition(kind: str, value: bool = True, reason: str = "", at: float = NOW - 50) -> Raw:
    """Return a condition as status holds it, by default with a reason that is documented."""
    return {
        "type": kind, "status": str(value),
        "reason": reason or documented_reason(kind, str(value)), "message": "m", "lastTransitionTime": timestamp(at),
    }  # fmt: skip


def raw_pod(index: int, incarnation: int = 0, *, role: Role = Role.WORKER, node: str = "n1", **more: Any) -> Raw:
    """Return a running pod.

    `phase`, `deleting`, `conditions`, `container` (its status), `status` (more of the pod's), `avoids`, `failed_starts`
    and `created` change it.
    """
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
    annotations = {AVOIDED_NODES: more.get("avoids"), FAILED_STARTS: more.get("failed_starts")}
    if any(annotations.values()):
        meta["annotations"] = {key: str(value) for key, value in annotations.items() if value}
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
        } | more.get("status", {}),
    }  # fmt: skip


def worker(index: int, incarnation: int = 0, **more: Any) -> Pod:
    """Return a worker pod that the operator has seen since its creation; arguments as for `raw_pod`."""
    return _seen(parse_pod(raw_pod(index, incarnation, **more)), more.get("created", NOW - 60))


def store(incarnation: int = 0, **more: Any) -> Pod:
    """Return a store pod that the operator has seen since its creation; arguments as for `raw_pod`."""
    raw = raw_pod(0, incarnation, role=Role.STORE, **more)
    return _seen(parse_pod(raw), more.get("created", NOW - 60))


def _seen(pod: Pod, at: float) -> Pod:
    return replace(pod, seen=at, seen_running=at if pod.phase == "Running" else 0.0)


def ended(exit_code: int, reason: str = "Error", termination: Termination | InRound | str = "") -> Raw:
    """Return the arguments for a pod whose trainer has ended; `termination` is its termination message."""
    message = termination if isinstance(termination, str) else codec.dumps(termination).decode()
    terminated = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": timestamp(NOW - 1)}
    return {"phase": "Failed" if exit_code else "Succeeded", "container": {"state": {"terminated": terminated}}}


def killed(round_number: int | None = None, reason: str = "OOMKilled") -> Raw:
    """Return the arguments for a pod whose agent was killed with its workers, in this round or before its first."""
    return ended(137, reason, InRound(RoundId(1, 0, round_number)) if round_number else "")


def failed_init(container: str = "setup", code: int = 3, message: str = "no such bucket") -> Raw:
    """Return the arguments for a pod whose init container failed."""
    end = {"name": container, "state": {"terminated": {"exitCode": code, "reason": "Error", "message": message}}}
    return {"phase": "Failed", "container": {"state": {}}, "status": {"initContainerStatuses": [end]}}


def evicted(message: str = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi".') -> Raw:
    """Return the arguments for a pod that the kubelet evicted for its own use."""
    return ended(137) | {"status": {"reason": "Evicted", "message": message}}


def declared(outcome: Outcome, failure: Failure | None = None) -> Termination:
    """Return a termination message that declares an outcome."""
    return Termination(outcome, "because", RoundId(1, 0, 1), "", failure)


def unschedulable(message: str = "0/3 nodes are available: 3 Insufficient cpu.") -> Raw:
    """Return the arguments for a pod without a node."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "node": "", "conditions": [scheduled]}


def failure(pod: str = "bert-0-0", **more: Any) -> Failure:
    """Return the failure of rank 0 by an exception, changed by `more`."""
    base = Failure(FailureClass.USER_ERROR, pod, NOW - 2, rank=0, exit_code=1, exception="ValueError", message="bad")
    return replace(base, **more)


def round_ended(n: int, reason: EndReason = EndReason.WORKER_FAILED, **more: Any) -> RoundEnded:
    """Return the end of round `n`; it is charged if a worker failed."""
    charged = reason is EndReason.WORKER_FAILED
    base = RoundEnded(RoundId(1, 0, n), reason, "a message", charged, NOW - 2, 2, failure() if charged else None)
    return replace(base, **more)


def report(*pods: Pod, formed_at: float = NOW - 30, **more: Any) -> Report:
    """Return the report of a store where a round of all `pods` runs."""
    nodes = tuple(AgentReport(p.index, p.incarnation, p.name, True, True) for p in pods)
    base = Report(
        incarnation=0, phase=RoundPhase.RUNNING, reason="", round=RoundId(1, 0, 1), rounds=1, world_size=len(pods),
        formed_at=formed_at, nodes=nodes, active=len(pods),
    )  # fmt: skip
    return replace(base, **more)


def gathering(*pods: Pod, **more: Any) -> Report:
    """Return the report of a store where no round runs and `pods` are connected."""
    none = {"phase": RoundPhase.GATHERING, "round": None, "world_size": 0, "active": 0, "formed_at": 0.0, "rounds": 0}
    return replace(report(*pods), **(none | more))


def standby_report(incarnation: int = 1, *pods: Pod, **more: Any) -> Report:
    """Return the report of a passive standby store to which `pods` are connected."""
    return gathering(*pods, **({"incarnation": incarnation, "phase": RoundPhase.STANDBY} | more))


def link(last_report: Report | None = None, *, since: float = NOW - 20, **lost: float) -> LinkView:
    """Return a connected link; `lost` maps lost pods (with underscores) to the time of their loss."""
    lost_pods = {name.replace("_", "-"): at for name, at in lost.items()}
    return LinkView(connected=True, since=since, report=last_report, lost_pods=lost_pods)


def steady(*, workers: tuple[Pod, ...] | None = None, last_report: Report | None = None, **fields: Any) -> Observed:
    """Return a job with a store that serves and two nodes that train; `fields` are added to its status."""
    pods = workers if workers is not None else (worker(0), worker(1))
    last_report = last_report or report(*(p for p in pods if p.running))
    return Observed(
        job=job(status=status(**fields)), workers=pods, stores=(store(), store(1, node="n9")), children=CHILDREN,
        link=link(last_report), standby_link=link(standby_report()),
    )  # fmt: skip


def without_standby(observed: Observed) -> Observed:
    """Return the same job without a standby store."""
    stores = tuple(pod for pod in observed.stores if pod.incarnation == 0)
    known = {**observed.job.status.raw, "rendezvous": {"endpoint": "bert-rdzv.ns.svc:29400", "incarnation": 0}}
    return replace(observed, job=job(status=known), stores=stores, standby_link=LinkView())


def run(observed: Observed, now: float = NOW) -> Plan:
    """Return the plan of an operator whose image is `IMAGE`. Fail if the API server would drop or refuse a part of the
    status, or if a condition is not as its page says."""
    decided = plan(observed, IMAGE, now)
    if decided.status is not None:
        assert find_mistakes(STATUS_SCHEMA, decided.status) == []
        assert undocumented(decided.status, observed.job.status.raw) == set()
    return decided


def status_of(p: Plan) -> Raw:
    """Return the status that the plan writes; fail if it writes none."""
    assert p.status is not None
    return dict(p.status)


def conditions_of(p: Plan) -> dict[str, Raw]:
    """Return the conditions that the plan writes, by type."""
    return {c["type"]: c for c in status_of(p)["conditions"]}


def reasons_of(p: Plan) -> dict[str, tuple[str, str]]:
    """Return status and reason of the conditions that the plan writes, by type."""
    return {kind: (c["status"], c["reason"]) for kind, c in conditions_of(p).items()}


def events_of(p: Plan, *, warning: bool | None = None) -> list[str]:
    """Return the reasons of the plan's Events: all of them, or only warnings, or only others."""
    return [e.reason for e in p.event_records if warning is None or e.warning is warning]

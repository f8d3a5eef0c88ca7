"""A pod to which an admission webhook has added a container in first place: the trainer is found by its name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import Outcome
from elasticjob_operator import manifests
from elasticjob_operator.model.cluster.pods import parse_pod
from support.operator.build import declared, job

SIDECAR: dict[str, Any] = {"name": "proxy", "image": "proxy:1", "resources": {"limits": {"nvidia.com/gpu": "9"}}}
RUNNING: dict[str, Any] = {"running": {}}
DONE = {
    "terminated": {"exitCode": 0, "reason": "Completed", "message": codec.dumps(declared(Outcome.SUCCEEDED)).decode()}
}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


def injected(name: str, sidecar: dict[str, Any], trainer: dict[str, Any], **template: Any) -> dict[str, Any]:
    """Return a worker pod whose trainer is called `name`, after the webhook, with these container states."""
    main = {"name": name, "image": "user:1", "command": ["python", "train.py"]}
    built = job(template={"spec": {"containers": [main]}} | template)
    assert built.spec is not None
    pod = copy.deepcopy(manifests.worker_pod_manifest(built, built.spec, 0, 0, "agent:1"))
    pod["spec"]["containers"].insert(0, SIDECAR)
    statuses = [{"name": "proxy", "state": sidecar}, {"name": name, "state": trainer}]
    pod["status"] = {"phase": "Running", "containerStatuses": statuses}
    return pod


@pytest.mark.parametrize("name", ["main", "trainer"])
def test_the_pod_ends_with_its_trainer_wherever_the_container_stands(name: str) -> None:
    assert parse_pod(injected(name, KILLED, RUNNING)).end is None
    done = parse_pod(injected(name, RUNNING, DONE))
    assert done.end is not None
    assert (done.end.outcome, done.end.exit_code) == (Outcome.SUCCEEDED, 0)
    killed = parse_pod(injected(name, DONE, KILLED))
    assert killed.end is not None
    assert (killed.end.reason, killed.end.outcome) == ("OOMKilled", None)


def test_kubectl_logs_shows_the_trainer_unless_the_template_names_another_container() -> None:
    key = "kubectl.kubernetes.io/default-container"
    assert injected("main", RUNNING, RUNNING)["metadata"]["annotations"][key] == "main"
    own = {"metadata": {"annotations": {key: "other", "elasticjob.dev/trainer": "other"}}}
    annotations = injected("main", RUNNING, RUNNING, **own)["metadata"]["annotations"]
    assert (annotations[key], annotations["elasticjob.dev/trainer"]) == ("other", "main")

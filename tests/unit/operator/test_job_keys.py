"""Keys of a job: they follow from the operator's master key, and the operator reads no Secret of a job."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Env, Role
from elasticjob_operator.kube import JOBS, PODS, SECRETS
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.model.observed import LinkView
from elasticjob_operator.plan import StoreAddress
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys, load_keys
from support.operator.build import NOW, UID, raw_job
from support.operator.world import Api, Node, World

KEY = ("ns", "bert")
FIRST, LATER = JobKeys(b"f" * 32), JobKeys(b"l" * 32)
ROTATED = JobKeys(LATER.master, previous=FIRST.master)
LEGACY = "bert-rdzv"
"""The Secret of a job's first execution, where an operator of 0.1.0 has begun it."""
RBAC = Path(__file__).resolve().parents[3] / "charts/elasticjob/templates/rbac.yaml"


class Links:
    """Links that only note the key of the last address."""

    key = b""

    def view(self, _: object) -> LinkView:
        return LinkView(since=NOW)

    def standby_view(self, _: object) -> LinkView:
        return LinkView()

    def set_address(self, _: object, address: StoreAddress | None, secret: bytes, standby: StoreAddress | None) -> None:
        self.key = secret if address else self.key

    def set_operator_view(self, *_: object) -> None: ...
    def set_standby_view(self, *_: object) -> None: ...
    def forget(self, _: object) -> None: ...


class Cluster:
    """An API server with one job. Its operators come one after another, each with the master key that it is given."""

    def __init__(self) -> None:
        self.api = Api(NOW)
        self.world = World(self.api, {"n1": Node("n1")})
        self.api.put(JOBS, raw_job())

    async def reconcile(self, keys: JobKeys) -> bytes:
        """Let a new operator start what is missing; return the key of the link that it opens to the store."""
        links: Any = Links()
        controller = Controller(self.api, keys, links, Recorder(self.api, "me"), "image", clock=lambda: self.api.now)
        for _ in range(2):
            await controller.reconcile(KEY)
            for pod in (*self.api.pods(Role.STORE), *self.api.pods(Role.WORKER)):
                if not pod.get("status", {}).get("phase"):
                    self.world.schedule(pod, "n1")
                    self.world.start(pod)
        await controller.reconcile(KEY)
        return bytes(links.key)

    def secrets(self) -> list[str]:
        return sorted(name for resource, name in self.api.objects if resource is SECRETS)

    def named_by_pods(self) -> set[str]:
        """Return the Secrets that pods of the job name."""
        return {secret_of(pod) for role in (Role.STORE, Role.WORKER) for pod in self.api.pods(role)}

    def lose(self, role: Role) -> None:
        """Remove the pods of a role."""
        for pod in self.api.pods(role):
            self.api.remove(PODS, pod["metadata"]["name"])

    def begin_as_0_1_0(self) -> None:
        """Turn the started job into one that an operator of 0.1.0 has started."""
        for pod in (*self.api.pods(Role.STORE), *self.api.pods(Role.WORKER)):
            for variable in key_variables(pod):
                variable["valueFrom"]["secretKeyRef"]["name"] = LEGACY
        (name,) = self.secrets()
        secret = self.api.objects.pop((SECRETS, name))
        self.api.put(SECRETS, {**secret, "metadata": {**secret["metadata"], "name": LEGACY}})
        job = self.api.objects[JOBS, "bert"]
        self.api.put(JOBS, {**job, "status": {k: v for k, v in job["status"].items() if k != "keyId"}})


def key_variables(pod: dict[str, Any]) -> list[dict[str, Any]]:
    containers = pod["spec"]["containers"]
    return [v for c in containers for v in c.get("env", ()) if v["name"] in (Env.NODE_KEY, Env.OPERATOR_KEY)]


def secret_of(pod: dict[str, Any]) -> str:
    (name,) = {v["valueFrom"]["secretKeyRef"]["name"] for v in key_variables(pod)}
    return str(name)


async def test_the_keys_of_a_job_follow_from_the_master_key_and_no_secret_of_it_is_read() -> None:
    cluster = Cluster()
    assert await cluster.reconcile(FIRST) == FIRST.derive(OPERATOR_KEY, UID, 1)
    assert cluster.secrets() == [f"bert-rdzv-{FIRST.key_id(UID, 1)}"]
    assert cluster.named_by_pods() == set(cluster.secrets())
    data = cluster.api.objects[SECRETS, cluster.secrets()[0]]["data"]
    decoded = {name: bytes.fromhex(base64.b64decode(value).decode()) for name, value in data.items()}
    assert decoded == {role: FIRST.derive(role, UID, 1) for role in (NODE_KEY, OPERATOR_KEY)}
    assert await cluster.reconcile(FIRST) == FIRST.derive(OPERATOR_KEY, UID, 1)
    assert "secrets" not in {plural for plural, _ in cluster.api.reads}


def test_the_operator_may_read_its_own_secret_only() -> None:
    rules = [line.split("secrets", 1)[1] for line in RBAC.read_text().splitlines() if "[secrets]" in line]
    assert [rule.partition("verbs: ")[2] for rule in rules] == ["[create]}", "[create]}", ""]
    assert (
        RBAC.read_text().count('resourceNames: [{{ include "elasticjob.name" . }}-master-key]\n    verbs: [get]') == 1
    )


async def test_a_secret_that_a_tenant_made_before_the_job_gives_it_no_keys() -> None:
    cluster = Cluster()
    for name in (LEGACY, f"{LEGACY}-{LATER.key_id(UID, 1)}"):
        cluster.api.put(
            SECRETS, {"metadata": {"name": name, "namespace": "ns"}, "data": {NODE_KEY: "", OPERATOR_KEY: ""}}
        )
    await cluster.reconcile(FIRST)
    assert cluster.named_by_pods() == {f"bert-rdzv-{FIRST.key_id(UID, 1)}"}


async def test_executions_keep_their_keys_when_the_master_key_is_replaced() -> None:
    cluster = Cluster()
    first = await cluster.reconcile(FIRST)
    before = cluster.secrets()
    assert await cluster.reconcile(ROTATED) == first
    cluster.lose(Role.WORKER)
    assert await cluster.reconcile(ROTATED) == first
    assert (cluster.secrets(), cluster.named_by_pods()) == (before, set(before))


async def test_pods_of_an_execution_whose_master_key_is_lost_still_have_the_same_keys() -> None:
    """The stores refuse this operator, but the job trains on, and its lost workers are replaced."""
    cluster = Cluster()
    await cluster.reconcile(FIRST)
    before = cluster.secrets()
    cluster.lose(Role.WORKER)
    assert await cluster.reconcile(LATER) == LATER.derive(OPERATOR_KEY, UID, 1)
    assert len(cluster.api.pods(Role.WORKER)) == 2
    assert (cluster.secrets(), cluster.named_by_pods()) == (before, set(before))


async def test_a_job_without_pods_gets_the_keys_of_the_present_master_key() -> None:
    cluster = Cluster()
    await cluster.reconcile(FIRST)
    cluster.lose(Role.WORKER)
    cluster.lose(Role.STORE)
    assert await cluster.reconcile(LATER) == LATER.derive(OPERATOR_KEY, UID, 1)
    assert cluster.named_by_pods() == {f"bert-rdzv-{LATER.key_id(UID, 1)}"}


async def test_a_job_that_0_1_0_has_started_goes_on_with_its_secret() -> None:
    cluster = Cluster()
    first = await cluster.reconcile(FIRST)
    cluster.begin_as_0_1_0()
    cluster.lose(Role.WORKER)
    assert await cluster.reconcile(FIRST) == first
    assert len(cluster.api.pods(Role.WORKER)) == 2
    assert (cluster.secrets(), cluster.named_by_pods()) == ([LEGACY], {LEGACY})


@pytest.mark.parametrize("message", ['secret "{}" not found', "couldn't find key node"])
async def test_a_secret_that_the_kubelet_does_not_find_is_made_again(message: str) -> None:
    cluster = Cluster()
    await cluster.reconcile(FIRST)
    (secret,) = cluster.secrets()
    cluster.api.remove(SECRETS, secret)
    pod = cluster.api.pods(Role.WORKER)[0]
    waiting = {"reason": "CreateContainerConfigError", "message": message.format(secret)}
    status = {"phase": "Pending", "containerStatuses": [{"name": "main", "state": {"waiting": waiting}}]}
    cluster.api.put(PODS, {**pod, "status": status})
    await cluster.reconcile(FIRST)
    assert cluster.secrets() == ([secret] if "secret" in message else [])


async def test_the_master_keys_are_read_from_the_operators_secret() -> None:
    api = Api(NOW)
    made = await load_keys(api, "system", "master")
    assert await load_keys(api, "system", "master") == made
    encoded = [base64.b64encode(keys.master).decode() for keys in (LATER, FIRST)]
    api.put(SECRETS, {"metadata": {"name": "master"}, "data": {"key": encoded[0], "previous": encoded[1]}})
    assert await load_keys(api, "system", "master") == ROTATED


@pytest.mark.parametrize("data", [{}, {"key": "?"}, {"key": "eHg="}, {"key": "a" * 44, "previous": "eHg="},
                                  {"key": "a" * 44, "previous": "?"}])  # fmt: skip
async def test_an_unusable_master_key_is_an_error(data: dict[str, str]) -> None:
    api = Api(NOW)
    api.put(SECRETS, {"metadata": {"name": "master"}, "data": data})
    with pytest.raises(ValueError, match="previous" if "previous" in data else r"data\.key"):
        await load_keys(api, "system", "master")

"""The PodDisruptionBudget and the NetworkPolicy of a job: when they exist, what they say, and the requests for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.actions import Action, DeletePolicy, WritePolicy
from elasticjob_operator.kube import BUDGETS, JOBS, NETWORK_POLICIES, PODS, Refused, Resource
from elasticjob_operator.manifests import policy_manifest
from elasticjob_operator.manifests.policies import read_network_policy
from elasticjob_operator.model.observed import DisruptionBudget, NetworkPolicy, Policies, Policy
from elasticjob_operator.observation.policies import POLICIES, POLICIES_SECONDS
from elasticjob_operator.plan import Plan
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from elasticjob_operator.settings import parse_settings
from support.operator.build import CHILDREN, NOW, UID, condition, elastic, job, raw_job, run, status, steady
from support.operator.world import READY, Api, FakeStoreLinks, World

KEY = ("ns", "bert")


def test_the_budget_counts_the_workers_of_this_job_and_protects_only_ready_ones() -> None:
    body = policy_manifest(job(), DisruptionBudget("", 2))
    (owner,) = body["metadata"]["ownerReferences"]
    assert (body["apiVersion"], body["kind"], body["metadata"]["name"]) == ("policy/v1", "PodDisruptionBudget", "bert")
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert body["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": {Label.JOB_NAME: "bert", Label.JOB_UID: UID, Label.ROLE: Role.WORKER.value}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


@pytest.mark.parametrize("namespace", ["", "system"])
def test_the_network_policy_admits_the_jobs_pods_and_the_operator_to_the_store(namespace: str) -> None:
    body = policy_manifest(job(), NetworkPolicy("", 1234, namespace))
    (owner,) = body["metadata"]["ownerReferences"]
    assert (body["apiVersion"], body["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert (body["metadata"]["name"], owner["uid"], owner["controller"]) == ("bert", UID, True)
    own = {"podSelector": {"matchLabels": {Label.JOB_UID: UID}}}
    operators = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "system"}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/component": "operator"}
        },
    }
    port = {"ports": [{"protocol": "TCP", "port": 1234}]}
    assert body["spec"] == {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own]}, port | ({"from": [operators]} if namespace else {})],
    }
    body["metadata"]["uid"] = "n"
    assert read_network_policy(body) == NetworkPolicy("n", 1234, namespace)


@pytest.mark.parametrize(
    ("environ", "namespace"),
    [({"POD_NAME": "o-1", "POD_NAMESPACE": "system"}, "system"), ({"POD_NAMESPACE": "system"}, ""), ({}, "")],
    ids=["a pod", "a process", "a process without a namespace"],
)
def test_only_an_operator_in_a_pod_can_be_named_by_a_network_policy(environ: dict[str, str], namespace: str) -> None:
    assert parse_settings([], environ).pod_namespace == namespace


# ---- decisions


def actions_for(kind: type[Policy], p: Plan) -> tuple[Action, ...]:
    """Return what a plan does to policies of this kind."""
    changes = (a for a in p.actions if isinstance(a, (WritePolicy, DeletePolicy)))
    return tuple(action for action in changes if isinstance(action.policy, kind))


def budget_actions(
    spec: Mapping[str, Any], budget: DisruptionBudget | None = None, *conditions: Any
) -> tuple[Action, ...]:
    """Return what the plan does to the PodDisruptionBudget of a job with this spec."""
    observed = steady()
    running = status(conditions=list(conditions))
    observed = replace(observed, job=job(status=running, **spec), policies=replace(observed.policies, budget=budget))
    return actions_for(DisruptionBudget, run(observed))


BUDGET = DisruptionBudget("b", 1)
CREATE, DELETE = WritePolicy(DisruptionBudget("", 1)), DeletePolicy(BUDGET)
SPARE = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "spares": 1}, "replicas": 1}


@pytest.mark.parametrize(
    ("spec", "absent", "present"),
    [
        (elastic(1, 4, 2), (CREATE,), ()),
        (elastic(2, 4, 3), (WritePolicy(DisruptionBudget("", 2)),), (WritePolicy(DisruptionBudget("b", 2)),)),
        (SPARE, (CREATE,), ()),
        ({"replicas": 2}, (), (DELETE,)),
        (elastic(2, 2), (), (DELETE,)),
        (elastic(2, 4, 2), (), (DELETE,)),
        (elastic(1, 4, 2) | {"disruptionBudget": False}, (), (DELETE,)),
        (elastic(1, 4, 2) | {"suspend": True}, (), (DELETE,)),
    ],
    ids=["elastic", "another minimum", "a spare", "no elasticPolicy", "minimum is maximum", "at the minimum", "off",
         "suspended"],
)  # fmt: skip
def test_a_job_has_a_budget_if_it_may_have_more_pods_than_it_needs(
    spec: Mapping[str, Any], absent: tuple[Action, ...], present: tuple[Action, ...]
) -> None:
    assert (budget_actions(spec), budget_actions(spec, BUDGET)) == (absent, present)


def test_a_budget_is_created_once_a_pod_is_ready_and_then_stays() -> None:
    observed = replace(steady(), job=job(status=status(), **elastic(1, 4, 2)), policies=Policies())
    starting = replace(observed, workers=tuple(replace(pod, ready=False) for pod in observed.workers))
    leaving = replace(observed, workers=tuple(replace(pod, deleting=NOW + 30) for pod in observed.workers))
    assert actions_for(DisruptionBudget, run(observed)) == (CREATE,)
    for none_ready in (starting, leaving):
        assert actions_for(DisruptionBudget, run(none_ready)) == ()
        with_budget = replace(none_ready, policies=Policies(budget=BUDGET))
        assert actions_for(DisruptionBudget, run(with_budget)) == ()


@pytest.mark.parametrize("ended", ["SuccessCriteriaMet", "Complete", "FailureTarget", "Failed"])
def test_a_job_whose_outcome_is_known_has_no_budget(ended: str) -> None:
    assert budget_actions(elastic(1, 4, 2), BUDGET, condition(ended)) == (DELETE,)
    assert budget_actions(elastic(1, 4, 2), None, condition(ended)) == ()


def network_actions(
    spec: Mapping[str, Any], policy: NetworkPolicy | None = None, *conditions: Any, namespace: str = ""
) -> tuple[Action, ...]:
    """Return what the plan of an operator in this namespace does to the NetworkPolicy of a job with this spec."""
    observed = replace(steady(), operator_namespace=namespace, policies=Policies(network=policy))
    running = status(conditions=list(conditions))
    return actions_for(
        NetworkPolicy, run(replace(observed, job=job(status=running, **{"networkIsolation": None, **spec})))
    )


ISOLATION = NetworkPolicy("n", 29400, "system")
ISOLATE = WritePolicy(replace(ISOLATION, uid=""))
HOST = {"spec": {"hostNetwork": True, "containers": [{"name": "m", "image": "i", "command": ["python"]}]}}


@pytest.mark.parametrize(
    ("spec", "absent", "present"),
    [
        ({}, (ISOLATE,), ()),
        ({"networkIsolation": True}, (ISOLATE,), ()),
        ({"networkIsolation": False}, (), (DeletePolicy(ISOLATION),)),
        ({"template": HOST}, (), (DeletePolicy(ISOLATION),)),
        (
            {"rendezvous": {"port": 1234}},
            (WritePolicy(NetworkPolicy("", 1234, "system")),),
            (WritePolicy(NetworkPolicy("n", 1234, "system")),),
        ),
        ({"suspend": True}, (), ()),
    ],
    ids=["by default", "on", "off", "the host's network", "another port", "suspended"],
)
def test_a_job_has_a_network_policy_unless_it_is_off_or_its_pods_have_no_address(
    spec: Mapping[str, Any], absent: tuple[Action, ...], present: tuple[Action, ...]
) -> None:
    found = (network_actions(spec, namespace="system"), network_actions(spec, ISOLATION, namespace="system"))
    assert found == (absent, present)


@pytest.mark.parametrize("namespace", ["", "other"])
def test_an_operator_in_another_namespace_admits_itself(namespace: str) -> None:
    assert network_actions({}, ISOLATION, namespace=namespace) == (WritePolicy(NetworkPolicy("n", 29400, namespace)),)


@pytest.mark.parametrize("ended", ["SuccessCriteriaMet", "Complete", "FailureTarget", "Failed"])
def test_pods_that_end_stay_isolated(ended: str) -> None:
    for policy in (None, ISOLATION):
        assert network_actions({}, policy, condition(ended), namespace="system") == ()


# ---- requests


KINDS = pytest.mark.parametrize(
    ("kind", "name"),
    [(BUDGETS, "PodDisruptionBudget"), (NETWORK_POLICIES, "NetworkPolicy")],
    ids=["budget", "network policy"],
)


class Cluster:
    """An API server with a job `bert`, and operators that come one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.api = Api(NOW)
        self.api.put(JOBS, raw_job(**spec))
        self.requests: list[str] = []
        """Requests for the policies of the job."""
        for verb in ("get", "create", "patch", "delete"):
            monkeypatch.setattr(self.api, verb, self._counted(verb))
        self.restart()

    def _counted(self, verb: str) -> Any:
        call = getattr(self.api, verb)

        async def counted(resource: Resource, *arguments: Any, **options: Any) -> Any:
            if resource in POLICIES:
                self.requests.append(f"{verb} {resource.plural}")
            return await call(resource, *arguments, **options)

        return counted

    def restart(self, namespace: str = "system") -> None:
        """Another operator takes over, whose pod is in this namespace."""
        links: Any = FakeStoreLinks(self.api, World(self.api, {}).stores)
        recorder = Recorder(self.api, "me")
        self.controller = Controller(
            self.api, JobKeys(b"k" * 32), links, recorder, "image", clock=lambda: self.api.now,
            operator_namespace=namespace,
        )  # fmt: skip

    async def reconcile(self, times: int = 3, after: float = 1.0) -> list[str]:
        """Reconcile some times, and let worker pods run; return the requests for policies."""
        self.requests.clear()
        for _ in range(times):
            self.api.now += after
            await self.controller.reconcile(KEY)
            for pod in self.api.pods(Role.WORKER):
                pod["status"] = {"phase": "Running", "conditions": [READY]}
        return list(self.requests)

    def change(self, **spec: Any) -> None:
        """Change the spec as a user does."""
        changed = self.api.objects[JOBS, "bert"]
        self.api.put(JOBS, {**changed, "spec": changed["spec"] | spec})

    def min_available(self) -> Any:
        found = self.api.objects.get((BUDGETS, "bert"))
        return found and found["spec"]["minAvailable"]


async def test_a_budget_costs_one_request_and_another_when_min_replicas_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, **elastic(1, 4, 3))
    assert await cluster.reconcile(times=20, after=20.0) == ["create poddisruptionbudgets"]
    assert cluster.min_available() == 1
    cluster.change(**elastic(2, 4, 3))
    assert await cluster.reconcile() == ["patch poddisruptionbudgets"]
    assert cluster.min_available() == 2
    cluster.change(disruptionBudget=False)
    assert await cluster.reconcile() == ["delete poddisruptionbudgets"]
    assert cluster.min_available() is None
    assert await cluster.reconcile(times=20) == []


async def test_a_network_policy_costs_one_request_in_the_life_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True)
    assert await cluster.reconcile(times=20, after=20.0) == ["create networkpolicies"]
    created = [plural for verb, plural, _ in cluster.api.calls if verb == "create"]
    assert created.index("networkpolicies") < created.index("pods")
    for suspend in (True, False):
        cluster.change(suspend=suspend)
        assert await cluster.reconcile(times=10, after=20.0) == []


@pytest.mark.parametrize(
    ("change", "verb"), [({"rendezvous": {"port": 1234}}, "patch"), ({"networkIsolation": False}, "delete")]
)
async def test_a_resumed_job_has_the_network_policy_of_its_new_spec(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], verb: str
) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True)
    await cluster.reconcile()
    cluster.change(suspend=True, **change)
    assert await cluster.reconcile(times=10) == []
    cluster.change(suspend=False)
    assert await cluster.reconcile(times=10) == [f"{verb} networkpolicies"]
    found = cluster.api.objects.get((NETWORK_POLICIES, "bert"))
    assert (found and read_network_policy(found).store_port) == (None if verb == "delete" else 1234)


async def test_a_new_operator_reads_the_policies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True, **elastic(1, 3, 2))
    await cluster.reconcile()
    reads = ["get poddisruptionbudgets", "get networkpolicies"]
    cluster.restart()
    assert await cluster.reconcile() == reads
    cluster.restart("elsewhere")
    assert await cluster.reconcile() == [*reads, "patch networkpolicies"]


async def test_a_new_operator_makes_the_budget_of_a_job_whose_pod_was_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, replicas=1)
    assert await cluster.reconcile(times=1) == []
    cluster.restart()
    watched = cluster.controller.watched
    watched.set_nodes_watched(True)
    for _ in range(2):
        await watched.list_again(cluster.api, ())
        await cluster.reconcile(times=2)
    assert cluster.min_available() == 1


@KINDS
async def test_a_deleted_policy_is_made_again_within_the_hour(
    monkeypatch: pytest.MonkeyPatch, kind: Resource, name: str
) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True, **elastic(1, 3, 2))
    await cluster.reconcile()
    cluster.api.remove(kind, "bert")
    await cluster.reconcile(times=2, after=POLICIES_SECONDS)
    assert (kind, "bert") in cluster.api.objects


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (BUDGETS, policy_manifest(job(), DisruptionBudget("", 1))),
        (NETWORK_POLICIES, policy_manifest(job(), NetworkPolicy("", 29400, "system"))),
    ],
    ids=["budget", "network policy"],
)
async def test_a_create_whose_answer_was_lost_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, kind: Resource, body: dict[str, Any]
) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True, **elastic(1, 3, 2))
    cluster.api.put(kind, body)
    requests = [request for request in await cluster.reconcile(times=5) if request.endswith(kind.plural)]
    assert requests == [f"create {kind.plural}", f"get {kind.plural}"]


@KINDS
@pytest.mark.parametrize("taken", [False, True], ids=["refused", "of another owner"])
async def test_a_job_runs_without_a_policy_that_cannot_be_created(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Resource, name: str, taken: bool
) -> None:
    cluster = Cluster(monkeypatch, networkIsolation=True, **elastic(1, 3, 2))
    foreign = {"metadata": {"name": "bert"}, "spec": {"mine": True}}
    if taken:
        cluster.api.put(kind, foreign)
    else:
        cluster.api.refused = kind
    await cluster.reconcile(times=6)
    assert [p["metadata"]["name"] for p in cluster.api.pods(Role.WORKER)] == ["bert-0-0", "bert-1-0"]
    assert f"no {name}: " in caplog.text
    later = await cluster.reconcile(times=60, after=10.0)
    assert 2 <= later.count(f"create {kind.plural}") <= 8
    found = cluster.api.objects.get((kind, "bert"))
    assert (found and found["spec"]) == (foreign["spec"] if taken else None)
    cluster.api.refused = None
    cluster.api.remove(kind, "bert")
    await cluster.reconcile(times=2, after=300.0)
    assert cluster.api.objects[kind, "bert"]["metadata"]["ownerReferences"]


@KINDS
async def test_an_operator_that_may_not_read_policies_runs_the_job_all_the_same(
    monkeypatch: pytest.MonkeyPatch, kind: Resource, name: str
) -> None:
    """A new operator with the permissions of an older chart."""
    cluster = Cluster(monkeypatch, networkIsolation=True, **elastic(1, 3, 2))
    await cluster.reconcile()
    get = cluster.api.get

    async def refuse(resource: Resource, *arguments: Any) -> Any:
        if resource is kind:
            raise Refused(f"{kind.plural} is forbidden", 403)
        return await get(resource, *arguments)

    monkeypatch.setattr(cluster.api, "get", refuse)
    cluster.restart()
    cluster.api.remove(PODS, "bert-1-0")
    await cluster.reconcile()
    assert [p["metadata"]["name"] for p in cluster.api.pods(Role.WORKER)] == ["bert-0-0", "bert-1-1"]


def test_a_steady_job_with_its_policies_has_nothing_to_do() -> None:
    observed = replace(steady(), policies=Policies(BUDGET, ISOLATION), operator_namespace="system", children=CHILDREN)
    isolated = job(status=status(), networkIsolation=True, **elastic(1, 4, 2))
    assert run(replace(observed, job=isolated)).actions == ()

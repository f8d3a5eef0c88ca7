"""The PodDisruptionBudget of a job: when it exists, what it says, and how many requests it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elasticjob.contract.names import Label, Role
from elasticjob_operator.actions import (
    Action,
    CreateDisruptionBudget,
    DeleteDisruptionBudget,
    UpdateDisruptionBudget,
)
from elasticjob_operator.controller import Controller
from elasticjob_operator.events import Recorder
from elasticjob_operator.keys import JobKeys
from elasticjob_operator.kube import BUDGETS, JOBS, PODS, Refused, Resource
from elasticjob_operator.manifests import disruption_budget_manifest
from elasticjob_operator.model.observed import DisruptionBudget, Policies
from elasticjob_operator.policies import POLICIES_SECONDS
from support.operator_build import CHILDREN, NOW, UID, condition, elastic, job, raw_job, run, status, steady
from support.operator_world import Api, FakeStoreLinks, World

KEY = ("ns", "bert")


def test_the_budget_counts_the_workers_of_this_job_and_protects_only_ready_ones() -> None:
    body = disruption_budget_manifest(job(), 2)
    (owner,) = body["metadata"]["ownerReferences"]
    assert (body["apiVersion"], body["kind"], body["metadata"]["name"]) == ("policy/v1", "PodDisruptionBudget", "bert")
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert body["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": {Label.JOB_NAME: "bert", Label.JOB_UID: UID, Label.ROLE: Role.WORKER.value}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


# ---- decisions


def budget_actions(
    spec: Mapping[str, Any], budget: DisruptionBudget | None = None, *conditions: Any
) -> tuple[Action, ...]:
    """Return what the plan does to the PodDisruptionBudget of a job with this spec."""
    observed = steady()
    running = status(conditions=list(conditions))
    observed = replace(observed, job=job(status=running, **spec), policies=replace(observed.policies, budget=budget))
    kinds = (CreateDisruptionBudget, UpdateDisruptionBudget, DeleteDisruptionBudget)
    return tuple(action for action in run(observed).actions if isinstance(action, kinds))


BUDGET = DisruptionBudget("b", 1)
CREATE, UPDATE, DELETE = CreateDisruptionBudget(1), UpdateDisruptionBudget("b", 1), DeleteDisruptionBudget("b")
SPARE = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "spares": 1}, "replicas": 1}


@pytest.mark.parametrize(
    ("spec", "absent", "present"),
    [
        (elastic(1, 4, 2), (CREATE,), ()),
        (elastic(2, 4, 3), (CreateDisruptionBudget(2),), (UpdateDisruptionBudget("b", 2),)),
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


@pytest.mark.parametrize("ended", ["SuccessCriteriaMet", "Complete", "FailureTarget", "Failed"])
def test_a_job_whose_outcome_is_known_has_no_budget(ended: str) -> None:
    assert budget_actions(elastic(1, 4, 2), BUDGET, condition(ended)) == (DELETE,)
    assert budget_actions(elastic(1, 4, 2), None, condition(ended)) == ()


# ---- requests


class Cluster:
    """An API server with an elastic job `bert`, and operators that come one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.api = Api(NOW)
        self.api.put(JOBS, raw_job(**(spec or elastic(1, 3, 2))))
        self.requests: list[str] = []
        """Requests for the policies of the job."""
        for verb in ("get", "create", "patch", "delete"):
            monkeypatch.setattr(self.api, verb, self._counted(verb))
        self.restart()

    def _counted(self, verb: str) -> Any:
        call = getattr(self.api, verb)

        async def counted(resource: Resource, *arguments: Any, **options: Any) -> Any:
            if resource is BUDGETS:
                self.requests.append(f"{verb} {resource.plural}")
            return await call(resource, *arguments, **options)

        return counted

    def restart(self) -> None:
        """Another operator takes over."""
        links: Any = FakeStoreLinks(self.api, World(self.api, {}).stores)
        recorder = Recorder(self.api, "me")
        self.controller = Controller(self.api, JobKeys(b"k" * 32), links, recorder, "image", clock=lambda: self.api.now)

    async def reconcile(self, times: int = 3, after: float = 1.0) -> list[str]:
        """Reconcile some times; return the requests for policies."""
        self.requests.clear()
        for _ in range(times):
            self.api.now += after
            await self.controller.reconcile(KEY)
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
    assert (await cluster.reconcile())[0] == "delete poddisruptionbudgets"
    assert cluster.min_available() is None
    assert await cluster.reconcile(times=20) == []


async def test_a_new_operator_reads_the_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    await cluster.reconcile()
    cluster.restart()
    assert await cluster.reconcile() == ["get poddisruptionbudgets"]


async def test_a_deleted_budget_is_made_again_within_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    await cluster.reconcile()
    cluster.api.remove(BUDGETS, "bert")
    await cluster.reconcile(times=2, after=POLICIES_SECONDS)
    assert cluster.min_available() == 1


async def test_a_create_whose_answer_was_lost_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    body = disruption_budget_manifest(job(), 1)
    cluster.api.put(BUDGETS, body)
    assert await cluster.reconcile(times=5) == ["create poddisruptionbudgets", "get poddisruptionbudgets"]


@pytest.mark.parametrize("taken", [False, True], ids=["refused", "of another owner"])
async def test_a_job_runs_without_a_budget_that_cannot_be_created(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: bool
) -> None:
    cluster = Cluster(monkeypatch)
    foreign = {"metadata": {"name": "bert"}, "spec": {"minAvailable": 7}}
    if taken:
        cluster.api.put(BUDGETS, foreign)
    else:
        cluster.api.refused = BUDGETS
    await cluster.reconcile(times=5)
    assert [p["metadata"]["name"] for p in cluster.api.pods(Role.WORKER)] == ["bert-0-0", "bert-1-0"]
    assert "no PodDisruptionBudget" in caplog.text
    later = await cluster.reconcile(times=600)
    assert 2 <= later.count("create poddisruptionbudgets") <= 8
    assert cluster.min_available() == (7 if taken else None)
    cluster.api.refused = None
    cluster.api.remove(BUDGETS, "bert")
    await cluster.reconcile(times=2, after=300.0)
    assert cluster.min_available() == 1


async def test_an_operator_that_may_not_read_budgets_runs_the_job_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new operator with the permissions of an older chart."""
    cluster = Cluster(monkeypatch)
    await cluster.reconcile()
    get = cluster.api.get

    async def refuse(resource: Resource, *arguments: Any) -> Any:
        if resource is BUDGETS:
            raise Refused("poddisruptionbudgets is forbidden", 403)
        return await get(resource, *arguments)

    monkeypatch.setattr(cluster.api, "get", refuse)
    cluster.restart()
    cluster.api.remove(PODS, "bert-1-0")
    await cluster.reconcile()
    assert [p["metadata"]["name"] for p in cluster.api.pods(Role.WORKER)] == ["bert-0-0", "bert-1-1"]


def test_a_steady_job_with_its_budget_has_nothing_to_do() -> None:
    observed = replace(steady(), policies=Policies(budget=BUDGET), children=CHILDREN)
    assert run(replace(observed, job=job(status=status(), **elastic(1, 4, 2)))).actions == ()

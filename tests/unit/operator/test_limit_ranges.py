"""The store's resources in a namespace with LimitRanges, and the init container's, which are the trainer's."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.contract.commands.worker_count import quantity
from elasticjob._runtime.contract.names import Role
from elasticjob_operator import manifests
from elasticjob_operator.kube import LIMIT_RANGES, PODS, Refused, Resource
from elasticjob_operator.manifests.store import LIMITS, REQUESTS
from elasticjob_operator.model.cluster.limit_ranges import fit_resources, read_bounds
from support.operator.build import Raw, job, raw_job
from support.operator.cluster import Cluster

OURS: Raw = {"requests": REQUESTS, "limits": LIMITS}


def limit_range(**item: Any) -> Raw:
    """Return a LimitRange for containers, as the API server has it."""
    return {"metadata": {"name": "limits", "labels": {}}, "spec": {"limits": [{"type": "Container", **item}]}}


FITS: list[tuple[str, list[Raw], Raw, Raw]] = [
    ("no LimitRange", [], REQUESTS, LIMITS),
    ("of volumes", [{"spec": {"limits": [{"type": "PersistentVolumeClaim", "min": {"cpu": "1"}}]}}], REQUESTS, LIMITS),
    ("a minimum", [limit_range(min={"cpu": "100m", "memory": "128Mi"})], {"cpu": "100m", "memory": "128Mi"}, LIMITS),
    ("a minimum above the limit", [limit_range(min={"memory": "1Gi"})],
     {"cpu": "50m", "memory": "1Gi"}, {"memory": "1Gi"}),
    ("the larger one of two", [limit_range(min={"cpu": "1"}), limit_range(min={"cpu": "100m"})],
     {"cpu": "1000m", "memory": "64Mi"}, LIMITS),
    ("a maximum", [limit_range(max={"cpu": "2", "memory": "256Mi"})], REQUESTS, {"cpu": "500m", "memory": "256Mi"}),
    ("a low maximum", [limit_range(max={"cpu": "20m"})], {"cpu": "20m", "memory": "64Mi"},
     {"cpu": "20m", "memory": "512Mi"}),
    ("a ratio", [limit_range(maxLimitRequestRatio={"cpu": "4", "memory": "2"})],
     {"cpu": "125m", "memory": "256Mi"}, {"cpu": "500m", "memory": "512Mi"}),
    ("a ratio of 1", [limit_range(maxLimitRequestRatio={"memory": "1"})], {"cpu": "50m", "memory": "512Mi"}, LIMITS),
    ("a ratio that is not whole", [limit_range(maxLimitRequestRatio={"memory": "3"})],
     {"cpu": "50m", "memory": "178956971"}, LIMITS),
    ("a default limit below the request", [limit_range(default={"cpu": "20m"})],
     REQUESTS, {"cpu": "50m", "memory": "512Mi"}),
    ("a default limit above it", [limit_range(default={"cpu": "1"})], REQUESTS, LIMITS),
    ("of a pod", [{"spec": {"limits": [{"type": "Pod", "min": {"memory": "100Mi"}}]}}],
     {"cpu": "50m", "memory": "100Mi"}, LIMITS),
    ("fields of other types", [{"spec": {"limits": [3, {"type": "Container", "min": "1", "max": {"cpu": {}}}]}}],
     {"cpu": "0m", "memory": "64Mi"}, {"cpu": "0m", "memory": "512Mi"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranges", "requests", "limits"), FITS, ids=[row[0] for row in FITS])
def test_the_stores_own_resources_are_as_near_as_the_limitranges_allow(
    name: str, ranges: list[Raw], requests: Raw, limits: Raw
) -> None:
    assert fit_resources(OURS, {}, ranges) == {"requests": dict(requests), "limits": dict(limits)}


@pytest.mark.parametrize("ratio", [1, 1.5, 2, 3, 7])
@pytest.mark.parametrize("least", [0, 0.07, 0.3])
@pytest.mark.parametrize("most", [1, 8])
def test_what_it_returns_is_within_the_bounds(ratio: float, least: float, most: float) -> None:
    item = {"min": {"cpu": least}, "max": {"cpu": most}, "maxLimitRequestRatio": {"cpu": ratio}}
    fitted = fit_resources(OURS, {}, [limit_range(**item)])
    request, limit = quantity(fitted["requests"]["cpu"]), quantity(fitted["limits"]["cpu"])
    assert least <= request <= limit <= most
    assert limit / request <= ratio + 1e-9


def test_what_the_job_says_stays() -> None:
    own = {"requests": {"cpu": "20m"}, "limits": {"memory": "2Gi"}}
    ranges = [limit_range(min={"cpu": "1"}, max={"memory": "1Gi"})]
    fitted = fit_resources({"requests": REQUESTS | own["requests"], "limits": LIMITS | own["limits"]}, own, ranges)
    assert (fitted["requests"]["cpu"], fitted["limits"]["memory"]) == ("20m", "2Gi")


def test_bounds_of_no_limitrange_are_none() -> None:
    bounds = read_bounds([], "cpu")
    assert (bounds.least, bounds.most, bounds.ratio, bounds.default_limit) == (None, None, None, None)


@pytest.mark.parametrize("readable", [True, False])
async def test_a_store_that_breaks_a_limitrange_is_created_again_within_it(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    cluster.api.put(LIMIT_RANGES, limit_range(min={"cpu": "100m"}))
    create, listed = cluster.api.create, cluster.api.list

    async def strict(resource: Resource, namespace: str, body: Any) -> Any:
        is_store = resource is PODS and "-rdzv-" in body["metadata"]["name"]
        if is_store and quantity(body["spec"]["containers"][0]["resources"]["requests"]["cpu"]) < 0.1:
            text = 'pods "bert-rdzv-0" is forbidden: minimum cpu usage per Container is 100m, but request is 50m'
            raise Refused(text, 403)
        return await create(resource, namespace, body)

    async def refuse(resource: Resource, *arguments: Any, **fields: Any) -> Any:
        if resource is LIMIT_RANGES and not readable:
            raise Refused("limitranges is forbidden", 403)
        return await listed(resource, *arguments, **fields)

    monkeypatch.setattr(cluster.api, "create", strict)
    monkeypatch.setattr(cluster.api, "list", refuse)
    await cluster.reconcile_for(5)
    stores = [p["spec"]["containers"][0]["resources"]["requests"]["cpu"] for p in cluster.api.pods(Role.STORE)]
    assert set(stores) == ({"100m"} if readable else set())
    if not readable:
        assert "minimum cpu usage per Container is 100m" in cluster.running()["message"]
        assert "If rendezvous.store is wrong, correct it" in cluster.running()["message"]


RESOURCES: list[tuple[str, Raw, Raw]] = [
    ("guaranteed", {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"cpu": 8, "memory": "64Gi"}},
     {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"cpu": 8, "memory": "64Gi"}}),
    ("limits only", {"limits": {"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 8}},
     {"limits": {"cpu": 8, "memory": "64Gi"}}),
    ("requests only", {"requests": {"cpu": "50m", "ephemeral-storage": "1Gi", "hugepages-2Mi": "1Gi"}},
     {"requests": {"cpu": "50m", "ephemeral-storage": "1Gi"}}),
    ("none", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "own", "expected"), RESOURCES, ids=[row[0] for row in RESOURCES])
def test_the_init_container_has_the_trainers_resources_without_devices(name: str, own: Raw, expected: Raw) -> None:
    raw = raw_job()
    raw["spec"]["template"]["spec"]["containers"][0]["resources"] = own
    built = job(**raw["spec"])
    assert built.spec is not None
    pod = manifests.worker_pod_manifest(built, built.spec, 0, 0, "agent:1")
    assert pod["spec"]["initContainers"][0]["resources"] == expected

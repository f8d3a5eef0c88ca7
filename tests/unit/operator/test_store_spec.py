"""What store pods take from the template of the workers, and what `rendezvous.store` says instead."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator import manifests
from elasticjob_operator.manifests.store import SAFE_TO_EVICT
from support.operator.build import Raw, job, raw_job


def store_pod(meta: Raw | None = None, store: Raw | None = None, avoid: tuple[str, ...] = (), **pod: Any) -> Raw:
    """Return the store pod of a job whose template has this metadata and these fields of a pod."""
    raw = raw_job()
    template = raw["spec"]["template"]
    template["spec"] |= pod
    template["metadata"] = meta or {}
    built = job(template=template, rendezvous={"store": store or {}})
    assert built.spec is not None
    return manifests.store_pod_manifest(built, built.spec, 3, "agent:1", avoid)


def own(found: Raw) -> Raw:
    """Return the labels of a pod that are not the operator's."""
    labels = found["metadata"]["labels"]
    return {k: v for k, v in labels.items() if "elasticjob.dev/" not in k and "kubernetes.io" not in k}


TERM = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"group": "a"}}}
EXPRESSION = {"topologyKey": "zone", "labelSelector": {"matchExpressions": [{"key": "group", "operator": "Exists"}]}}

LABELS: list[tuple[str, Raw, Raw, Raw]] = [
    ("a policy's", {"team": "vision", "cost-center": "42"}, {}, {"team": "vision", "cost-center": "42"}),
    ("of a mesh", {"sidecar.istio.io/inject": "false"}, {}, {"sidecar.istio.io/inject": "false"}),
    ("that usually select", {"app": "bert", "k8s-app": "bert", "run": "bert", "team": "t"}, {}, {"team": "t"}),
    ("of the system", {"kueue.x-k8s.io/queue-name": "q", "scheduling.x-k8s.io/pod-group": "g"}, {}, {}),
    ("of required anti-affinity", {"group": "a"},
     {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}}, {}),
    ("of preferred affinity", {"group": "a"}, {"affinity": {"podAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": EXPRESSION}]}}}, {}),
    ("of topology spread", {"group": "a", "hash": "h"},
     {"topologySpreadConstraints": [TERM | {"matchLabelKeys": ["hash"]}]}, {}),
    ("of other types", {"team": 3, "other": "x"}, {"affinity": [], "topologySpreadConstraints": {}}, {"other": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "labels", "pod", "expected"), LABELS, ids=[row[0] for row in LABELS])
def test_labels_of_the_template_that_store_pods_have(name: str, labels: Raw, pod: Raw, expected: Raw) -> None:
    assert own(store_pod({"labels": labels}, **pod)) == expected


EVICTABLE = {SAFE_TO_EVICT: "true"}
KEPT = {SAFE_TO_EVICT: "false"}


def test_labels_and_annotations_of_the_store_replace_those_of_the_template() -> None:
    meta = {"labels": {"team": "a"}, "annotations": {"sidecar.istio.io/inject": "false"}}
    assert own(store_pod(meta, {"labels": {}})) == {}
    store = {"labels": {"app": "x", "elasticjob.dev/role": "worker"}, "annotations": {"a": "b"}}
    found = store_pod(meta, store, ("n1",))
    assert own(found) == {"app": "x"}
    assert found["metadata"]["labels"]["elasticjob.dev/role"] == "store"
    assert found["metadata"]["annotations"] == {"a": "b", "elasticjob.dev/avoids": "n1", **EVICTABLE}


def test_only_annotations_about_a_mesh_are_taken_from_the_template() -> None:
    others = {"k8s.v1.cni.cncf.io/networks": "rdma", "prometheus.io/scrape": "true"}
    annotations = {"linkerd.io/inject": "disabled", **others}
    taken = {"linkerd.io/inject": "disabled"}
    assert store_pod({"annotations": annotations})["metadata"]["annotations"] == {**taken, **EVICTABLE}
    assert store_pod()["metadata"]["annotations"] == EVICTABLE


def test_a_store_cannot_avoid_nodes_by_an_annotation() -> None:
    pod = store_pod(store={"annotations": {"elasticjob.dev/avoids": "n1", **KEPT}})
    assert pod["metadata"]["annotations"] == KEPT, "the job's own word about evictions counts"


TOLERATIONS = [{"key": "team", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("pod", "store", "expected"),
    [
        ({}, {}, (None, None, None)),
        ({"serviceAccountName": "a", "priorityClassName": "high", "tolerations": TOLERATIONS}, {},
         ("a", "high", TOLERATIONS)),
        ({"serviceAccount": "a"}, {}, ("a", None, None)),
        ({"serviceAccountName": "a", "priorityClassName": "high", "tolerations": TOLERATIONS},
         {"serviceAccountName": "", "priorityClassName": "", "tolerations": []}, (None, None, None)),
        ({"serviceAccountName": "a", "priorityClassName": "high"},
         {"serviceAccountName": "b", "priorityClassName": "low", "tolerations": TOLERATIONS},
         ("b", "low", TOLERATIONS)),
    ],
    ids=["none", "the template's", "the deprecated name", "none on purpose", "the store's"],
)  # fmt: skip
def test_account_priority_and_tolerations(pod: Raw, store: Raw, expected: tuple[Any, ...]) -> None:
    spec = store_pod(store=store, **pod)["spec"]
    assert tuple(spec.get(n) for n in ("serviceAccountName", "priorityClassName", "tolerations")) == expected
    assert spec["automountServiceAccountToken"] is False


def test_the_node_selector_of_the_template_is_for_workers_only() -> None:
    assert "nodeSelector" not in store_pod(nodeSelector={"gpu": "h100"})["spec"]

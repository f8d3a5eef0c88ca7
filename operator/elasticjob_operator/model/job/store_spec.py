"""What the store pods of a job take from `spec.rendezvous.store`, and from the template of the workers without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from elasticjob_operator.model.cluster.raw import Raw, at, mapping, objects, text

_SELECTING_LABELS = frozenset({"app", "component", "k8s-app", "name", "role", "run", "tier", "version"})
"""Labels by which Services, NetworkPolicies and PodDisruptionBudgets usually select the pods of one application."""
_SYSTEM_DOMAINS = ("k8s.io", "x-k8s.io", "kubernetes.io", "elasticjob.dev")
"""Labels of these domains and their subdomains have a meaning for components of the cluster, such as a queue."""
MESH_SWITCHES = frozenset(
    {
        "sidecar.istio.io/inject",
        "istio.io/rev",
        "istio.io/dataplane-mode",
        "linkerd.io/inject",
        "kuma.io/sidecar-injection",
        "consul.hashicorp.com/connect-inject",
    }
)
"""Annotations (in some meshes labels) that say whether a pod is in a mesh. Stores and workers connect to each other, so
they are on the same side."""


@dataclass(frozen=True)
class StoreSpec:
    """How the store pods are labelled and scheduled, and which resources they get."""

    resources: Raw = field(default_factory=dict)
    """Requests and limits that replace the operator's own, each by itself."""
    labels: Raw = field(default_factory=dict)
    annotations: Raw = field(default_factory=dict)
    priority_class: str = ""
    service_account: str = ""
    node_selector: Raw = field(default_factory=dict)
    tolerations: tuple[Raw, ...] = ()


def read_store(raw: Raw, template: Raw) -> StoreSpec:
    """Return the store's part of a spec. A field that `raw` (`rendezvous.store`) has, even empty, replaces what the
    store takes from the template."""
    pod = mapping(template, "spec")
    return StoreSpec(
        resources=mapping(raw, "resources"),
        labels=_texts(mapping(raw, "labels")) if "labels" in raw else inherited_labels(template),
        annotations=_texts(mapping(raw, "annotations")) if "annotations" in raw else _inherited_annotations(template),
        priority_class=text(raw if "priorityClassName" in raw else pod, "priorityClassName"),
        service_account=text(raw, "serviceAccountName") if "serviceAccountName" in raw else _service_account(pod),
        node_selector=mapping(raw, "nodeSelector"),
        tolerations=tuple(objects(raw if "tolerations" in raw else pod, "tolerations")),
    )


def inherited_labels(template: Raw) -> dict[str, str]:
    """Return the labels of the template that store pods have too: those that policies of a cluster may demand.

    Labels that select pods are not among them, or a Service for the workers would send connections to stores, and the
    template's anti-affinity would keep workers off the nodes of stores.
    """
    selected = {*_SELECTING_LABELS, *_selected_keys(mapping(template, "spec"))}
    own = _texts(mapping(template, "metadata", "labels"))
    return {key: value for key, value in own.items() if key not in selected and not _is_system(key)}


def _service_account(pod: Raw) -> str:
    return text(pod, "serviceAccountName") or text(pod, "serviceAccount")


def _inherited_annotations(template: Raw) -> dict[str, str]:
    own = _texts(mapping(template, "metadata", "annotations"))
    return {key: value for key, value in own.items() if key in MESH_SWITCHES}


def _is_system(key: str) -> bool:
    domain = key.rpartition("/")[0]
    return any(domain == system or domain.endswith(f".{system}") for system in _SYSTEM_DOMAINS)


def _selected_keys(pod: Raw) -> Iterator[str]:
    """Yield the keys of labels that the template's own affinity and topology spread constraints select."""
    terms = [*objects(pod, "topologySpreadConstraints")]
    for kind in ("podAffinity", "podAntiAffinity"):
        affinity = mapping(pod, "affinity", kind)
        terms += objects(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
        preferred = objects(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
        terms += [mapping(term, "podAffinityTerm") for term in preferred]
    for term in terms:
        yield from mapping(term, "labelSelector", "matchLabels")
        yield from (text(e, "key") for e in objects(term, "labelSelector", "matchExpressions"))
        for keys in (at(term, "matchLabelKeys"), at(term, "mismatchLabelKeys")):
            yield from (key for key in (keys if isinstance(keys, list) else ()) if isinstance(key, str))


def _texts(values: Raw) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, str)}

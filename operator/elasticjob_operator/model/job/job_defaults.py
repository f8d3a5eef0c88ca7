"""Defaults of a platform for what jobs leave open: a job's spec wins over its namespace's defaults, and those over the
cluster's. An administrator writes them; a job may set another value. Pure.

Only fields whose absence the operator sees can have one: the API server fills in those with a default in the CRD, and
then nothing tells whether the job has set them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, VERSION
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob._runtime.local.manifest.manifest_yaml import ManifestYamlError, read_yaml_documents
from elasticjob_operator.model.cluster.raw import Raw, at, integer, mapping, text

Path = tuple[str, ...]

DEFAULT_FIELDS: tuple[Path, ...] = (
    ("preload",),
    ("elasticPolicy", "spares"),
    ("rendezvous", "store", "resources"),
    ("rendezvous", "store", "priorityClassName"),
    ("rendezvous", "store", "nodeSelector"),
    ("rendezvous", "store", "tolerations"),
    ("failurePolicy", "rules"),
    ("hangPolicy",),
    ("waitForMinSeconds",),
    ("activeDeadlineSeconds",),
    ("ttlSecondsAfterFinished",),
    ("template", "spec", "priorityClassName"),
)
"""Fields of spec that may have a default. Each is taken whole from one place: rules or resources are not mixed."""
CLUSTER, NAMESPACE = "Cluster", "Namespace"
"""Where a field has its default from."""
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECTIONS = ("cluster", "namespaces")


@dataclass(frozen=True)
class JobDefaults:
    """What one job gets for the fields that it leaves open, in the form of a spec."""

    cluster: Raw = field(default_factory=dict)
    namespace: Raw = field(default_factory=dict)
    problem: str = ""
    """Why newer defaults for this job are refused; empty if none are."""

    @property
    def record(self) -> dict[str, Any]:
        """The defaults as `status.defaults` has them; empty if there are none, and none were refused."""
        found = {"cluster": dict(self.cluster), "namespace": dict(self.namespace), "problem": self.problem}
        return {name: value for name, value in found.items() if value}


NO_DEFAULTS = JobDefaults()


def recorded_defaults(status: Raw) -> JobDefaults:
    """Return the defaults that a job's status has of its execution.

    An operator that knows no defaults may have begun a later execution, and kept the field.
    """
    record = mapping(status, "defaults")
    if integer(record, "execution") != integer(status, "executionAttempts"):
        return NO_DEFAULTS
    return JobDefaults(mapping(record, "cluster"), mapping(record, "namespace"), text(record, "problem"))


def effective_spec(spec: Raw, defaults: JobDefaults) -> tuple[Raw, dict[str, str]]:
    """Return the spec with the defaults for absent fields, and for each of these fields where it comes from."""
    sources: dict[str, str] = {}
    for path in DEFAULT_FIELDS:
        # A job that has only replicas gets no elasticPolicy: with one, its planned ends would have another limit too.
        if at(spec, *path) is not None or (path[0] == "elasticPolicy" and not mapping(spec, "elasticPolicy")):
            continue
        for source, layer in ((NAMESPACE, defaults.namespace), (CLUSTER, defaults.cluster)):
            if (value := at(layer, *path)) is not None:
                spec = _with_value(spec, path, value)
                sources[".".join(path)] = source
                break
    return spec, sources


def _with_value(spec: Raw, path: Path, value: Any) -> Raw:
    name, *rest = path
    return {**spec, name: _with_value(mapping(spec, name), tuple(rest), value) if rest else value}


# ---- what an administrator writes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlatformDefaults:
    """The defaults of all namespaces."""

    cluster: Raw = field(default_factory=dict)
    namespaces: Mapping[str, Raw] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """By section (`cluster`, `namespaces.<name>`; empty: all of it), why what is written is refused."""

    def of(self, namespace: str) -> JobDefaults:
        """Return the defaults of the jobs of a namespace."""
        sections = "", "cluster", f"namespaces.{namespace}"
        problem = "; ".join(self.problems[section] for section in sections if section in self.problems)
        return JobDefaults(self.cluster, self.namespaces.get(namespace, {}), problem)


def read_platform_defaults(written: str, last: PlatformDefaults) -> PlatformDefaults:
    """Return the defaults in a YAML text. A section with a mistake is refused alone, and stays as in `last`."""
    try:
        documents = read_yaml_documents(written)
    except ManifestYamlError as error:
        return refuse_all(f"it is not YAML: {error}", last)
    if len(documents) > 1 or not all(isinstance(document, dict) for document in documents):
        return refuse_all("it is not one object with `cluster` and `namespaces`", last)
    found = documents[0] if documents else {}
    unknown = [name for name in found if name not in _SECTIONS]
    if unknown:
        return refuse_all(f"unknown field {unknown[0]!r}: it may have `cluster` and `namespaces`", last)
    spaces = found.get("namespaces") or {}
    if not isinstance(spaces, dict):
        return refuse_all("`namespaces` is not an object with a field for each namespace", last)
    problems: dict[str, str] = {}
    cluster = _section("cluster", found.get("cluster"), last.cluster, problems)
    namespaces = {
        name: _section(f"namespaces.{name}", section, last.namespaces.get(name, {}), problems)
        for name, section in spaces.items()
    }
    for name in spaces:
        if not _NAMESPACE.fullmatch(name):
            problems[f"namespaces.{name}"] = f"{name!r} is no name of a namespace"
    return PlatformDefaults(cluster, namespaces, problems)


def refuse_all(why: str, last: PlatformDefaults) -> PlatformDefaults:
    """Return `last` with the reason why what is written now cannot be read."""
    return PlatformDefaults(last.cluster, last.namespaces, {"": why})


def _section(name: str, section: Any, last: Raw, problems: dict[str, str]) -> Raw:
    found = find_default_problems(section)
    if found:
        problems[name] = "; ".join(found)
        return last
    return section or {}


def find_default_problems(section: Any) -> list[str]:
    """Return the mistakes in the defaults of a cluster or a namespace, by the CRD's own schema and rules."""
    if section is None:
        return []
    if not isinstance(section, dict):
        return ["it is not an object with fields of spec"]
    if refused := [path for path in _paths(section, ()) if path not in DEFAULT_FIELDS]:
        named, possible = (", ".join(".".join(path) for path in paths) for paths in (refused, DEFAULT_FIELDS))
        return [f"{named} can have no default: only {possible} can"]
    trainer = {"name": "trainer", "image": "x", "command": ["x"]}
    least = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 1}, "template": {"spec": {"containers": [trainer]}}}
    spec, _ = effective_spec(least, JobDefaults(cluster=section))
    return find_problems(
        {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "defaults"}, "spec": spec}
    )


def _paths(value: Any, path: Path) -> Iterator[Path]:
    """Yield the fields in a section, down to those that may have a default, or that contain none."""
    leads_further = any(path == field[: len(path)] != field for field in DEFAULT_FIELDS)
    if not (leads_further and isinstance(value, dict)):
        yield path
        return
    for name, child in value.items():
        yield from _paths(child, (*path, str(name)))

"""crds/elasticjobs.yaml is generated from its source, and agrees with the contract and with the operator's defaults."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.names import DEFAULT_PORT, GROUP, KIND, PLURAL, VERSION
from elasticjob_operator.__main__ import NEWEST_STATUS_FIELD
from elasticjob_operator.model.job.job_defaults import DEFAULT_FIELDS
from support.common.read_yaml import read_yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CRDS = REPOSITORY / "crds"
JOB_SCHEMA = REPOSITORY / "agent/elasticjob/_runtime/local/manifest/job_schema.json"
CHART_COPY = REPOSITORY / "charts/elasticjob/files/elasticjobs.yaml"


def schema_of(path: Path) -> dict[str, Any]:
    (version,) = read_yaml(path)["spec"]["versions"]
    result: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return result


SOURCE = schema_of(CRDS / "elasticjobs.in.yaml")
CRD = schema_of(CRDS / "elasticjobs.yaml")
SPEC = CRD["properties"]["spec"]["properties"]
STATUS = CRD["properties"]["status"]["properties"]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", CRDS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_types_of_kubernetes(source: Any, generated: Any) -> Any:
    """Return `generated` without the schemas that replaced the source's `$ref`s."""
    if isinstance(source, list):
        return [without_types_of_kubernetes(s, g) for s, g in zip(source, generated, strict=True)]
    if not isinstance(source, dict):
        return generated
    if "$ref" in source:
        assert generated.keys() > source.keys() - {"$ref"}
        return source
    assert source.keys() == generated.keys()
    return {key: without_types_of_kubernetes(source[key], generated[key]) for key in source}


def test_the_committed_crd_is_generated_from_the_source() -> None:
    (version,) = generator().source()["spec"]["versions"]
    source = version["schema"]["openAPIV3Schema"]
    assert without_types_of_kubernetes(source, CRD) == source


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"default": 3, "minimum": 0, "maximum": 10000}, "Default: 3. From 0 to 10000."),
        ({"minimum": 1}, "At least 1."),
        ({"default": ["torch", "torch._dynamo"], "maxItems": 32}, "Default: [torch, torch._dynamo]. At most 32 items."),
        ({"default": True}, "Default: true."),
        ({"default": {}}, ""),
        ({"type": "string"}, ""),
    ],
)
def test_a_description_has_the_default_and_the_limits(schema: dict[str, Any], text: str) -> None:
    assert generator().describe_limits(schema) == text
    assert SPEC["failurePolicy"]["properties"]["maxRestarts"]["description"].endswith("Default: 3. From 0 to 10000.")


def test_the_pages_of_the_reference_are_generated_from_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CRDS))
    pages: Any = importlib.import_module("reference_pages")
    for page, generated in ((pages.API_PAGE, pages.api_tables()), (pages.VALUES_PAGE, pages.values_table())):
        assert pages.with_generated(page.read_text(), generated) == page.read_text(), f"`make crds` writes {page.name}"
    assert "| `maxRestarts` | integer, from 0 to 10000 | `3` | Number of worker failures" in pages.API_PAGE.read_text()
    assert "| `operator.qps` | `100` | Requests to the API server" in pages.VALUES_PAGE.read_text()


def test_references_are_inlined() -> None:
    swagger = {
        "io.k8s.api.core.v1.Toleration": {
            "description": "dropped",
            "type": "object",
            "properties": {
                "port": {"$ref": "#/definitions/io.k8s.apimachinery.pkg.util.intstr.IntOrString"},
                "key": {"type": "string", "description": "dropped", "x-kubernetes-patch-strategy": "merge"},
            },
        }
    }
    filled = generator().Expander(swagger).filled({"items": [{"$ref": "Toleration", "nullable": True}]})
    expected = {"port": {"x-kubernetes-int-or-string": True}, "key": {"type": "string"}}
    assert filled == {"items": [{"type": "object", "properties": expected, "nullable": True}]}


def test_the_schema_has_only_keywords_of_the_api_server() -> None:
    """In YAML flow style, the text after a comma in an unquoted description becomes a field of its own."""
    known = {
        "type", "format", "description", "properties", "items", "required", "additionalProperties", "default", "enum",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "pattern", "nullable",
        "anyOf", "oneOf",
    }  # fmt: skip

    def check(node: dict[str, Any], at: str) -> None:
        assert {key for key in node if not key.startswith("x-kubernetes-")} <= known, at
        for name, child in node.get("properties", {}).items():
            check(child, f"{at}.{name}")
        for inner in ("items", "additionalProperties"):
            if isinstance(node.get(inner), dict):
                check(node[inner], f"{at}.{inner}")

    check(CRD, "")


def undescribed(node: dict[str, Any], at: str) -> list[str]:
    """Return the paths of fields without a description. Kubernetes' own types (`$ref`) need none for their fields."""
    fields = {**node.get("properties", {}), **node.get("items", {}).get("properties", {})}
    found = [f"{at}.{name}" for name, child in fields.items() if not child.get("description")]
    return [*found, *(path for name, child in fields.items() for path in undescribed(child, f"{at}.{name}"))]


def test_every_field_of_spec_and_status_has_a_description() -> None:
    parts = {name: SOURCE["properties"][name] for name in ("spec", "status")}
    assert [name for name, part in parts.items() if not part.get("description")] == []
    assert [path for name, part in parts.items() for path in undescribed(part, name)] == []


def descriptions(part: Any) -> Iterator[str]:
    """Yield all descriptions of a schema, and the messages of its rules."""
    if isinstance(part, dict):
        yield from (part[key] for key in ("description", "message") if isinstance(part.get(key), str))
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from descriptions(child)


def test_a_node_in_a_description_is_a_node_of_kubernetes() -> None:
    words = re.compile(r"(?<![-\w])(?:nodes?|machines?)\b")
    assert [text for text in descriptions(SOURCE) if words.search(text)] == []


def test_every_list_map_key_is_required_or_has_a_default() -> None:
    def check(node: Any) -> None:
        for key in node.get("x-kubernetes-list-map-keys", ()):
            item = node["items"]
            assert key in item.get("required", ()) or "default" in item["properties"][key], key
        children = [*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")]
        for child in children:
            if isinstance(child, dict):
                check(child)

    check(CRD)


@pytest.mark.parametrize(
    "field", ["nodeSelector", "tolerations", "containers", "initContainers", "volumes", "affinity"]
)
def test_the_template_has_the_fields_of_a_pod_spec(field: str) -> None:
    assert field in SPEC["template"]["properties"]["spec"]["properties"]


def test_names_are_those_of_the_contract() -> None:
    crd = read_yaml(CRDS / "elasticjobs.yaml")
    assert crd["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (GROUP, KIND)
    assert [version["name"] for version in crd["spec"]["versions"]] == [VERSION]


def test_defaults_are_those_of_the_operator() -> None:
    model = pytest.importorskip("elasticjob_operator.model.job.spec")
    defaults = {field.name: field.default for field in fields(model.JobSpec)}
    rendezvous = {name: value.get("default") for name, value in SPEC["rendezvous"]["properties"].items()}
    assert rendezvous["port"] == DEFAULT_PORT
    assert rendezvous["joinTimeoutSeconds"] == defaults["join_timeout"]
    assert rendezvous["lastCallTimeoutSeconds"] == defaults["last_call_timeout"]
    assert rendezvous["keepAliveIntervalSeconds"] == defaults["keep_alive_interval"]
    assert rendezvous["keepAliveMaxAttempts"] == defaults["keep_alive_attempts"]
    assert tuple(SOURCE["properties"]["spec"]["properties"]["preload"]["x-operator-default"]) == defaults["preload"]
    assert SPEC["stopGraceSeconds"]["default"] == defaults["stop_grace"]
    assert SPEC["restartStrategy"]["default"] == defaults["restart_strategy"].value
    assert SPEC["podReplacementPolicy"]["default"] == defaults["pod_replacement"].value
    assert SPEC["podTerminationTimeoutSeconds"]["default"] == defaults["termination_timeout"]
    policy = SPEC["failurePolicy"]["properties"]
    assert policy["maxRestarts"]["default"] == defaults["max_restarts"]
    assert policy["restartWindowSeconds"]["default"] == defaults["restart_window"]
    assert policy["backoffSeconds"]["default"] == defaults["backoff"]
    assert policy["maxBackoffSeconds"]["default"] == defaults["max_backoff"]
    assert policy["maxStartFailures"]["default"] == defaults["max_start_failures"]
    elastic = SPEC["elasticPolicy"]["properties"]
    assert elastic["faultyScaleDownSeconds"]["default"] == defaults["faulty_scale_down"]


LIMITS = {
    "replicas": (None, 1, 4096),
    "elasticPolicy.minReplicas": (None, 1, 4096),
    "elasticPolicy.maxReplicas": (None, 1, 4096),
    "elasticPolicy.replicaIncrementStep": (1, 1, 4096),
    "elasticPolicy.scaleUpStabilizationSeconds": (30, 0, 3600),
    "elasticPolicy.spares": (None, 0, 64),
    "elasticPolicy.gracefulShutdownSeconds": (120, 0, 3600),
    "elasticPolicy.faultyScaleDownSeconds": (300, 0, 86400),
    "rendezvous.port": (29400, 1024, 65535),
    "rendezvous.joinTimeoutSeconds": (600, 10, 86400),
    "rendezvous.lastCallTimeoutSeconds": (30, 0, 3600),
    "rendezvous.keepAliveIntervalSeconds": (1, 1, 300),
    "rendezvous.keepAliveMaxAttempts": (3, 1, 100),
    "stopGraceSeconds": (1, 0, 3600),
    "failurePolicy.maxRestarts": (3, 0, 10000),
    "failurePolicy.restartWindowSeconds": (0, 0, 31536000),
    "failurePolicy.backoffSeconds": (0, 0, 3600),
    "failurePolicy.maxBackoffSeconds": (300, 1, 86400),
    "failurePolicy.maxStartFailures": (10, 1, 10000),
    "failurePolicy.avoidNodeSeconds": (86400, 60, 31536000),
    "hangPolicy.progressTimeoutSeconds": (None, 10, 86400),
    "waitForMinSeconds": (None, 1, 86400),
    "activeDeadlineSeconds": (None, 1, None),
    "ttlSecondsAfterFinished": (None, 0, None),
    "podTerminationTimeoutSeconds": (120, 0, 3600),
}
"""Default, minimum and maximum of each number of the spec."""


def numbers(schema: dict[str, Any], path: str = "") -> dict[str, tuple[int | None, int | None, int | None]]:
    found: dict[str, tuple[int | None, int | None, int | None]] = {}
    for name, child in schema["properties"].items():
        if "properties" in child:
            found |= numbers(child, f"{path}{name}.")
        elif child.get("type") == "integer":
            found[path + name] = (child.get("default"), child.get("minimum"), child.get("maximum"))
    return found


def test_defaults_and_limits_of_numbers() -> None:
    """A lower maximum or a higher minimum would refuse manifests of earlier versions."""
    assert numbers(SOURCE["properties"]["spec"]) == LIMITS


def test_columns_and_scale_name_fields_that_exist() -> None:
    (version,) = read_yaml(CRDS / "elasticjobs.yaml")["spec"]["versions"]
    scale = version["subresources"]["scale"]
    for path in [*(c["jsonPath"] for c in version["additionalPrinterColumns"]), *scale.values()]:
        node = CRD
        for name in path.removeprefix(".").replace('[?(@.type=="Suspended")]', ".items").split("."):
            if name == "metadata":
                break
            node = node["items"] if name == "items" else node["properties"][name]
        else:
            assert node["type"] in {"string", "integer", "number", "boolean"}, path


def test_the_columns_of_kubectl_get() -> None:
    (version,) = read_yaml(CRDS / "elasticjobs.yaml")["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert [column["name"] for column in columns if not column.get("priority")] == [
        "Phase", "Ready", "Desired", "Restarts", "Progress", "Age",
    ]  # fmt: skip
    assert wide == ["Min", "Max", "World", "Goodput", "Suspended"]


def test_the_crd_fits_the_last_applied_annotation_of_kubectl_apply() -> None:
    crd = read_yaml(CRDS / "elasticjobs.yaml")
    assert len(json.dumps(crd, separators=(",", ":"))) < 200_000


def test_the_chart_ships_the_same_crd() -> None:
    assert CHART_COPY.read_bytes() == (CRDS / "elasticjobs.yaml").read_bytes()


def test_the_chart_has_the_list_of_reserved_variables_of_the_contract() -> None:
    assert (REPOSITORY / "charts/elasticjob/files/reserved-variables.json").read_text() == generator().reserved_text()


def test_the_chart_checks_defaults_for_jobs_by_the_schema_of_the_crd() -> None:
    crd = read_yaml(CRDS / "elasticjobs.yaml")
    values_schema = (REPOSITORY / "charts/elasticjob/values.schema.json").read_text()
    assert generator().with_defaults_schema(values_schema, crd) == values_schema
    assert json.loads(values_schema)["definitions"]["jobSpecDefaults"]["properties"]["hangPolicy"]["required"] == [
        "progressTimeoutSeconds"
    ]


def test_a_field_that_the_platform_may_set_has_no_default_that_the_api_server_fills_in() -> None:
    for path in DEFAULT_FIELDS:
        node: Any = CRD["properties"]["spec"]
        for name in path:
            node = node["properties"][name]
        assert "default" not in node, path
        if path[0] != "template":
            assert node["description"].endswith("the platform may have another default: see status.defaults."), path


def test_the_agent_ships_the_same_schema() -> None:
    crd = read_yaml(CRDS / "elasticjobs.yaml")
    assert JOB_SCHEMA.read_text() == generator().job_schema_text(crd)


def test_the_operator_asks_for_a_status_field_that_the_crd_has() -> None:
    assert NEWEST_STATUS_FIELD in CRD["properties"]["status"]["properties"]

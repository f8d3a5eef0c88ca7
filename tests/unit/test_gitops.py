"""The health checks of docs/operate/gitops.md, run by the rules of Flux and of Argo CD on what the operator writes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from elasticjob._runtime.contract.messages import Outcome
from elasticjob._runtime.local.manifest.cel import parse_cel
from elasticjob_operator.model.observed import Observed
from support.operator.build import (
    REPOSITORY,
    Raw,
    condition,
    declared,
    ended,
    gathering,
    job,
    killed,
    raw_job,
    report,
    run,
    status,
    steady,
    unschedulable,
    worker,
)

PAGE = (REPOSITORY / "docs/operate/gitops.md").read_text()
FLUX, ARGO = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))


def written(observed: Observed) -> Raw:
    """Return a job with the status that the operator writes."""
    p = run(observed)
    return raw_job(status=dict(p.status or observed.job.status.raw))


def pulling() -> Observed:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    pods = tuple(worker(index, phase="Pending", container=waiting) for index in (0, 1))
    return steady(workers=pods, last_report=gathering())


def restarting() -> Observed:
    pods = (worker(0, **killed(1)), worker(1))
    seen = steady(workers=pods, last_report=gathering(pods[1], rounds=1))
    return replace(seen, job=job(status=status(rendezvousRound=1)))


def ended_job(succeeded: bool) -> Observed:
    kind, target = ("Complete", "SuccessCriteriaMet") if succeeded else ("Failed", "FailureTarget")
    known = status(conditions=[condition(target), condition(kind)], completionTime="2026-01-01T00:00:00Z")
    pods = tuple(worker(i, **ended(0, "Completed", declared(Outcome.SUCCEEDED))) for i in (0, 1))
    return replace(steady(workers=pods), job=job(status=known))


def suspended() -> Observed:
    return Observed(job(status=status(conditions=[condition("Suspended", reason="SuspendedByUser")]), suspend=True))


PODS = (worker(0), worker(1))
ONE_ROOM = (worker(0), worker(1, **unschedulable()))

JOBS: list[tuple[str, Raw, str, str]] = [
    ("applied", raw_job(), "InProgress", "Progressing"),
    ("new", written(Observed(job())), "InProgress", "Progressing"),
    ("without room", written(steady(workers=ONE_ROOM, last_report=gathering(PODS[0]))), "InProgress", "Progressing"),
    ("cannot pull its image", written(pulling()), "InProgress", "Degraded"),
    ("trains", written(steady(workers=PODS, last_report=report(*PODS))), "Current", "Healthy"),
    ("restarts", written(restarting()), "InProgress", "Progressing"),
    ("suspended", written(suspended()), "Current", "Suspended"),
    ("has succeeded", written(ended_job(succeeded=True)), "Current", "Healthy"),
    ("has failed", written(ended_job(succeeded=False)), "Failed", "Degraded"),
    ("changed since", written(steady()) | {"metadata": {"generation": 2}}, "InProgress", "Progressing"),
    ("has failed, changed since", written(ended_job(succeeded=False)) | {"metadata": {"generation": 2}},
     "InProgress", "Progressing"),
]  # fmt: skip
TABLE = pytest.mark.parametrize(("name", "found", "flux", "argo"), JOBS, ids=[row[0] for row in JOBS])


def flux_status(found: Raw) -> str:
    """Return the status by the rules of Flux: RFC 0009 and `runtime/cel/status_evaluator.go` of fluxcd/pkg.

    First the generation; then the expressions inProgress, failed and current. An error is no status, and Flux asks
    again until its time-out.
    """
    observed = found["status"].get("observedGeneration")
    if observed is not None and observed != found["metadata"]["generation"]:
        return "InProgress"
    (check,) = FLUX["spec"]["healthCheckExprs"]
    assert (check["apiVersion"], check["kind"]) == (found["apiVersion"], found["kind"])
    for name in ("inProgress", "failed", "current"):
        if name in check and parse_cel(check[name])(found):
            return name[0].upper() + name[1:]
    return "InProgress"


@TABLE
def test_the_status_of_flux(name: str, found: Raw, flux: str, argo: str) -> None:
    assert flux_status(found) == flux


def argo_health(found: Raw) -> dict[str, Any]:
    """Return what Argo CD's health check returns: a script in Lua with the variable `obj`."""
    lua = pytest.importorskip("lupa.lua51").LuaRuntime()  # the version of Lua in Argo CD

    def table(value: Any) -> Any:
        if isinstance(value, dict):
            return lua.table_from({key: table(item) for key, item in value.items()})
        return lua.table_from([table(item) for item in value]) if isinstance(value, list) else value

    lua.globals().obj = table(found)
    (script,) = ARGO["data"].values()
    health = lua.execute(script)
    return {"status": health["status"], "message": health["message"]}


@TABLE
def test_the_health_in_argo_cd(name: str, found: Raw, flux: str, argo: str) -> None:
    health = argo_health(found)
    assert health["status"] == argo
    assert health["message"]


def test_the_check_of_argo_cd_has_the_name_of_the_kind() -> None:
    assert list(ARGO["data"]) == ["resource.customizations.health.elasticjob.dev_ElasticJob"]


def test_the_reasons_that_wait_for_a_person_are_reasons_of_running() -> None:
    (script,) = ARGO["data"].values()
    reasons = re.findall(r"(\w+) = true", script)
    reference = (REPOSITORY / "docs/reference/conditions-and-events.md").read_text()
    running = reference[reference.index("| `Running` | True") : reference.index("| `FullyScaled` | True")]
    assert reasons
    assert [reason for reason in reasons if f"`{reason}`" not in running] == []

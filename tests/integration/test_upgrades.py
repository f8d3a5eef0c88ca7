"""An operator of another version takes over a job that runs, and gives it back: an upgrade, a rollback.

The job keeps its version of agents and store. Both operators, the stores, the agents and the workers are processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat.local_cluster import LocalCluster, OperatorProcess
from compat.versions import TODAY, VERSIONS, code_of
from elasticjob_operator.model.job.status_lists import without_lists

STEPS = 25
"""Steps of each rank by which a test knows that it trains."""


def sides(version: str, older_first: bool) -> tuple[Path, Path]:
    """Return the code of the operator that starts the job, and of the one that takes it over."""
    return (code_of(version), TODAY) if older_first else (TODAY, code_of(version))


def runs(cluster: LocalCluster, **status: object) -> Callable[[dict[str, Any]], bool]:
    """Return whether both nodes train, both stores are connected, and the status has these values."""
    wanted = {"phase": "Running", "active": 2, **status}

    def reached(decided: dict[str, Any]) -> bool:
        return all(decided["connected"]) and all(cluster.status.get(name) == value for name, value in wanted.items())

    return reached


def trains(cluster: LocalCluster) -> Callable[[dict[str, Any]], bool]:
    """Return whether every rank has made some more steps since now, with both stores connected."""
    before = [len(cluster.steps(rank)) for rank in range(2)]

    def reached(decided: dict[str, Any]) -> bool:
        return all(decided["connected"]) and all(len(cluster.steps(rank)) >= before[rank] + STEPS for rank in range(2))

    return reached


def take_over(cluster: LocalCluster, operator: OperatorProcess) -> None:
    """Reconcile with another operator than before, and assert that the job does not notice."""
    kept = ("incarnations", "restarts", "rendezvousRound", "rendezvous", "runtimeImage", "executionAttempts")
    workers, status = cluster.workers(), {name: without_lists(cluster.status).get(name) for name in kept}
    actions = cluster.reconcile(operator, trains(cluster), "the job trains with the other operator")
    assert actions == []
    assert {name: without_lists(cluster.status).get(name) for name in kept} == status
    assert cluster.workers() == workers
    for rank, process in enumerate(workers):
        steps = [step for pid, step in cluster.steps(rank) if pid == process]
        assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("older_first", [True, False], ids=["upgrade", "rollback"])
def test_a_job_that_runs_changes_its_operator(version: str, older_first: bool, tmp_path: Path) -> None:
    first, second = sides(version, older_first)
    with LocalCluster(first, tmp_path / "job") as cluster:
        with OperatorProcess(first, "elasticjob:first") as operator:
            cluster.reconcile(operator, runs(cluster), "two nodes train")
            cluster.reconcile(operator, trains(cluster), "the workers make steps")
        with OperatorProcess(second, "elasticjob:second") as operator:
            take_over(cluster, operator)
            os.kill(cluster.workers()[1], signal.SIGKILL)
            cluster.reconcile(operator, runs(cluster, restarts=1), "a failed worker is restarted and charged")
            cluster.reconcile(operator, trains(cluster), "the workers make steps after a failure")
            cluster.delete("job-1-0")
            replaced = runs(cluster, incarnations="0,1")
            gone = lambda decided: "job-1-0" not in cluster.pods and replaced(decided)  # noqa: E731
            cluster.reconcile(operator, gone, "a drained pod is replaced")
            assert cluster.pods["job-1-1"]["spec"]["initContainers"][0]["image"] == "elasticjob:first"
            cluster.reconcile(operator, trains(cluster), "the workers make steps after a drain")
            assert (cluster.status["restarts"], cluster.status["restartsCountTowardsMax"]) == (1, 1)
        with OperatorProcess(first, "elasticjob:first") as operator:
            take_over(cluster, operator)
            (cluster.folder / "done").touch()
            ended = lambda _: cluster.status["phase"] == "Succeeded" and not cluster.children["nodes"]  # noqa: E731
            cluster.reconcile(operator, ended, "the job succeeds")
        status = cluster.status
        with OperatorProcess(second, "elasticjob:second") as operator:
            assert cluster.reconcile(operator, lambda _: True, "a reconcile") == []
        assert without_lists(cluster.status) == without_lists(status)
        assert older_first is False or cluster.status == status, "a finished job is written for the lists alone"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("older_first", [True, False], ids=["upgrade", "rollback"])
def test_a_suspended_job_stays_suspended_and_is_resumed_with_the_version_of_its_new_operator(
    version: str, older_first: bool, tmp_path: Path
) -> None:
    first, second = sides(version, older_first)
    with LocalCluster(second, tmp_path / "job") as cluster:
        cluster.job["spec"]["suspend"] = True
        suspended = lambda _: cluster.status.get("phase") == "Suspended"  # noqa: E731
        with OperatorProcess(first, "elasticjob:first") as operator:
            assert cluster.reconcile(operator, suspended, "the job is suspended") == []
        with OperatorProcess(second, "elasticjob:second") as operator:
            assert cluster.reconcile(operator, suspended, "the job stays suspended") == []
            cluster.job["spec"]["suspend"] = False
            cluster.reconcile(operator, runs(cluster, runtimeImage="elasticjob:second"), "the job is resumed")

"""One fault of each kind in a job with in-process restart: what is reported, and which process is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.training.fault_draw import KINDS, UNNOTICED, Incident, RankFault
from support.training.faulty_job import FaultyJob, possible_kinds

pytestmark = pytest.mark.torch
pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["cpu", pytest.param("queued device", marks=pytest.mark.deep)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyJob]:
    """One job for all faults. At the end, all its steps are compared with those of a single process.

    On a queued device, `test_random_faults_in_process` has some of the faults in each `make test`.
    """
    with FaultyJob(tmp_path_factory.mktemp("faults"), queued_device=request.param == "queued device") as job:
        yield job
        job.finish()


FAULTS = {
    "exception": (4, "WorkerFailed: rank 2 died: ValueError: requested by the test"),
    "memory error": (4, r"WorkerFailed: rank 2 died: MemoryError"),
    "deadlock in a collective": (4, r"WorkerFailed: rank \d: no progress .*\(Hang\)"),
    "exit": (3, r"WorkerFailed: rank 2 died: exit 3"),
    "SIGKILL": (3, r"WorkerFailed: rank 2 died: SIGKILL"),
    "SIGSEGV": (3, r"WorkerFailed: rank 2 died: SIGSEGV"),
    "SIGSTOP": (3, r"WorkerFailed: rank 2: no progress .* the process does not respond.*\(Hang\)"),
    "interpreter held": (3, r"WorkerFailed: rank 2: no progress .*_hold_interpreter.*\(Hang\)"),
    "killed for memory": (3, r"WorkerFailed: rank 2 died: SIGKILL"),
    "node lost": (3, r"AgentLost: toy-\d-\d lost"),
    "node cut": (3, r"AgentLost: toy-\d-\d lost"),
    "slow rank": (4, ""),
    "store lost": (4, ""),
}
"""Processes of four that stay, and what ends the round, if it ends."""


def test_every_kind_of_fault_is_here() -> None:
    assert FAULTS.keys() == {*KINDS}
    assert {kind for kind, (_, ended) in FAULTS.items() if not ended} == {*UNNOTICED}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_each_kind(kind: str, job: FaultyJob) -> None:
    """The rank stops after a step. `inject` checks who survives, and every step of every rank is checked."""
    if kind not in possible_kinds():
        pytest.skip(f"{kind}: needs root, iptables and the memory controller of cgroup v1")
    kept, ended = FAULTS[kind]
    report = job.inject(Incident((RankFault(kind, 2, "step"),)))
    if kind != "node cut":  # on a busy machine the node may be connected again before its agent has noticed the cut
        assert (report.kept, report.replaced) == (kept, 4 - kept)
    if ended:
        job.wait_for(rf"round \S+ ended: {ended}")


@pytest.mark.parametrize(("second", "kept"), [("SIGKILL", 2), ("exception", 3)])
def test_two_ranks_fail_at_once(second: str, kept: int, job: FaultyJob) -> None:
    """After the same step. The two others stay, and so does the one that raises."""
    faults = (RankFault("SIGKILL", 1, "step"), RankFault(second, 3, "step"))
    report = job.inject(Incident(faults, same_step=True))
    assert (report.kept, report.replaced) == (kept, 4 - kept)


@pytest.mark.parametrize("point", ["called", "formed", "synced"])
def test_a_fault_in_a_recovery_and_one_in_the_recovery_from_that(point: str, job: FaultyJob) -> None:
    """The two processes that no fault hits stay; a rank that raises stays too."""
    faults = (
        RankFault("SIGKILL", 0, "backward"),
        RankFault("exception", 1, point, recovery=True),
        RankFault("SIGKILL", 2, point, recovery=True),
    )
    report = job.inject(Incident(faults))
    assert (report.kept, report.replaced) == (2, 2)


@pytest.mark.parametrize("second", ["called", "forward"])
def test_a_process_whose_recovery_fails_twice_in_a_row_is_replaced(second: str, job: FaultyJob) -> None:
    """Also if it fails in its first step, which begins after the `State.sync` that reports one."""
    faults = (
        RankFault("exception", 0, "step"),
        RankFault("exception", 1, "synced", recovery=True),
        RankFault("exception", 1, second, recovery=True),
    )
    report = job.inject(Incident(faults, replaced=(2,)))
    assert (report.kept, report.replaced) == (3, 1)
    job.wait_for("rank 1 failed 2 times in a row before its first step: a new process takes its place")


def test_a_rank_that_hangs_in_a_recovery_is_replaced(job: FaultyJob) -> None:
    """It has made no step in this round, but in an earlier one: the time that a start needs is known."""
    faults = (RankFault("exception", 0, "step"), RankFault("SIGSTOP", 1, "called", recovery=True))
    report = job.inject(Incident(faults))
    assert (report.kept, report.replaced) == (3, 1)
    job.wait_for(r"round \S+ ended: WorkerFailed: rank 1: no progress .* the process does not respond.*\(Hang\)")


def test_the_node_of_the_rounds_store_is_lost_while_the_other_ranks_connect_to_it(job: FaultyJob) -> None:
    """Rank 0's node has the store."""
    faults = (RankFault("exception", 2, "step"), RankFault("node lost", 0, "called", recovery=True))
    report = job.inject(Incident(faults))
    assert (report.kept, report.replaced) == (3, 1)


def test_two_nodes_are_lost_with_the_store(job: FaultyJob) -> None:
    """Half of the round and the coordinator at once: the other half waits for the new store, and keeps its state."""
    faults = (
        RankFault("node lost", 0, "step"),
        RankFault("node lost", 1, "step"),
        RankFault("store lost", 2, "step"),
    )
    report = job.inject(Incident(faults))
    assert (report.kept, report.replaced) == (2, 2)

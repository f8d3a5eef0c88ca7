"""Steps of an elastic job in a queue: each is a Workload of its own, and the job shrinks where Kueue preempts one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from elasticjob_operator.actions import (
    CreateStep,
    DeactivateStep,
    DeleteWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
    StepAction,
)
from elasticjob_operator.model.cluster.workload import Workload, WorkloadCondition, parse_workload
from elasticjob_operator.model.job.status import Condition
from elasticjob_operator.plan.life_cycle.queue_steps import (
    MOST_STEPS,
    Demand,
    admitted_pods,
    describe_steps,
    plan_steps,
    step_size,
)

TRUE = {
    "admitted": (WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED),
    "ready": (WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED, WorkloadCondition.PODS_READY),
    "evicted": (WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED, WorkloadCondition.EVICTED),
    "released": (WorkloadCondition.EVICTED,),
    "waits": (),
    "finished": (WorkloadCondition.QUOTA_RESERVED, WorkloadCondition.ADMITTED, WorkloadCondition.FINISHED),
}


def workload(name: str, state: str, count: int = 1, **more: Any) -> Workload:
    """Return a Workload in one of the states of TRUE."""
    true = TRUE[state]
    conditions = {kind: Condition("True", "Preempted", "for job urgent") for kind in true}
    if WorkloadCondition.QUOTA_RESERVED not in true:
        conditions[WorkloadCondition.QUOTA_RESERVED] = Condition("False", "Pending", "insufficient quota")
    reserved = WorkloadCondition.QUOTA_RESERVED in true
    known: dict[str, Any] = {
        "queue": "team-a", "template": "t", "priority_class": "steps", "flavors": ("h100",) if reserved else (),
        "admitted_count": count if reserved else None,
    }  # fmt: skip
    return Workload(name, f"uid-{name}", count=count, conditions=conditions, **(known | more))


def base(state: str = "ready", count: int = 2, **more: Any) -> Workload:
    return workload("base", state, count, **{"priority_class": "normal"} | more)


def steps(*states: str | Workload) -> dict[int, Workload]:
    """Return steps of one pod each in these states, or as they are given."""
    return {i: workload(f"s{i}", s) if isinstance(s, str) else s for i, s in enumerate(states)}


def demand(live: int = 2, wanted: int = 4, **more: Any) -> Demand:
    known: dict[str, Any] = {"minimum": 2, "maximum": max(4, wanted), "running": live, "trains": True}
    return Demand("team-a", "t", "steps", wanted=wanted, live=live, **(known | more))


def delete(index: int) -> DeleteWorkload:
    return DeleteWorkload(f"s{index}", f"uid-s{index}")


# ---- how many pods


@pytest.mark.parametrize(
    ("minimum", "maximum", "increment", "size", "number"),
    [
        (2, 4, 1, 1, 2),
        (2, 18, 1, 1, 16),
        (2, 19, 1, 2, 9),
        (1, 4096, 1, 256, 16),
        (8, 64, 8, 8, 7),  # a step that is preempted costs one increment
        (8, 4096, 8, 256, 16),
        (4, 4, 1, 1, 0),
    ],
)
def test_a_job_has_few_steps_of_whole_increments(
    minimum: int, maximum: int, increment: int, size: int, number: int
) -> None:
    assert step_size(minimum, maximum, increment) == size
    asked = demand(minimum, maximum, minimum=minimum, maximum=maximum, increment=increment)
    created = plan_steps(base(count=minimum), {}, asked)
    assert len(created) == number
    assert sum(action.count for action in created if isinstance(action, CreateStep)) == maximum - minimum


@pytest.mark.parametrize(
    ("of_base", "of_steps", "pods"),
    [
        (base(), {}, 2),
        (base(), steps("ready", "waits"), 3),
        (base(), steps("evicted", "ready"), 3),  # the pods of the first step have to end
        (base(), steps("evicted", "evicted"), 2),
        (base(), steps("released", "finished"), 2),
        (base(), steps(workload("s0", "ready", 4, reclaimed=1)), 5),
        (base(), steps(workload("s0", "ready", flavors=("a100",))), 2),
        (base(), steps(workload("s0", "ready", has_topology=True)), 2),
        (base(), steps(workload("s0", "ready", active=False)), 2),
        (base(), steps(workload("s0", "ready", template="old")), 2),
        (base("evicted"), steps("ready", "ready"), 0),  # the whole job is evicted, whatever its steps have
        (base("waits"), steps("ready"), 0),
        (None, steps("ready"), 0),
    ],
)
def test_a_job_has_the_pods_of_its_base_and_of_admitted_steps(
    of_base: Workload | None, of_steps: dict[int, Workload], pods: int
) -> None:
    assert admitted_pods(of_base, of_steps) == pods


# ---- what happens to the steps


@pytest.mark.parametrize(
    ("of_steps", "asked", "expected"),
    [
        pytest.param({}, demand(), [CreateStep(0, 1), CreateStep(1, 1)], id="just admitted"),
        pytest.param(steps("waits"), demand(), [CreateStep(1, 1)], id="a step was deleted by hand"),
        pytest.param(steps("waits", "waits"), demand(), [], id="steps wait"),
        pytest.param(steps("ready", "ready"), demand(4), [], id="at its maximum"),
        pytest.param(steps("evicted", "ready"), demand(4), [], id="preempted: its pods have not ended"),
        pytest.param(steps("evicted", "ready"), demand(3), [ReleaseQuota("s0")], id="preempted: they have"),
        pytest.param(steps("ready", "evicted"), demand(3, running=2), [ReleaseQuota("s1")], id="while pods start"),
        pytest.param(steps("evicted", "evicted"), demand(4), [], id="two at once: no pod has ended"),
        pytest.param(steps("evicted", "evicted"), demand(3), [ReleaseQuota("s0")], id="two at once: one has"),
        pytest.param(
            steps("evicted", "evicted"), demand(2), [ReleaseQuota("s0"), ReleaseQuota("s1")],
            id="two at once: both have",
        ),
        pytest.param(
            steps(workload("s0", "evicted", 2), "evicted"), demand(4, wanted=5), [ReleaseQuota("s1")],
            id="two of different sizes: what fits goes first",
        ),
        pytest.param(steps("released", "ready"), demand(3), [], id="released: it keeps its place in the queue"),
        pytest.param(
            steps(workload("s0", "evicted", 2, reclaimed=1)), demand(2), [delete(0)], id="evicted after it shrank"
        ),
        pytest.param(steps("ready", "waits"), demand(3, wanted=3), [delete(1)], id="wants fewer: one waits"),
        pytest.param(steps("ready", "ready"), demand(4, wanted=3), [], id="wants fewer: its pods have not ended"),
        pytest.param(steps("ready", "ready"), demand(3, wanted=3), [delete(1)], id="wants fewer: they have"),
        pytest.param(
            steps("ready", "admitted"), demand(3, wanted=3, running=3), [delete(1)], id="admitted while it scales down"
        ),
        pytest.param(
            steps("evicted", "ready"), demand(3, wanted=3), [delete(0)], id="preempted while it scales down"
        ),
        pytest.param(
            steps(workload("s0", "ready", 4)), demand(3, wanted=3), [ReclaimPods(3, "s0")], id="wants a part of a step"
        ),
        pytest.param(
            steps(workload("s0", "ready", 4, reclaimed=1)), demand(3, wanted=3), [ReclaimPods(3, "s0")],
            id="wants a smaller part of it",
        ),
        pytest.param(
            steps(workload("s0", "ready", 4, reclaimed=3)), demand(3), [CreateStep(1, 1)], id="wants more again"
        ),
        pytest.param(steps(workload("s0", "waits", 4)), demand(2, wanted=3), [delete(0)], id="wants a part: it waits"),
        pytest.param(
            steps(workload("s0", "waits", priority_class="other"), "waits"), demand(), [delete(0)],
            id="another priority while it waits",
        ),
        pytest.param(
            steps(workload("s0", "ready", priority_class="other"), "waits"), demand(3), [],
            id="another priority while it is admitted: it stays until it is evicted",
        ),
        pytest.param(
            steps(workload("s0", "admitted", flavors=("a100",)), "ready"), demand(3),
            [DeactivateStep("s0", "uid-s0")], id="another flavor",
        ),
        pytest.param(
            steps(workload("s0", "admitted", has_topology=True), "ready"), demand(3),
            [DeactivateStep("s0", "uid-s0")], id="a topology",
        ),
        pytest.param(
            steps(workload("s0", "admitted", flavors=("a100",), active=False), "ready"), demand(3), [],
            id="deactivated: Kueue evicts it",
        ),
        pytest.param(
            steps(workload("s0", "evicted", flavors=("a100",), active=False), "ready"), demand(3),
            [ReleaseQuota("s0")], id="deactivated: evicted",
        ),
        pytest.param(steps("admitted"), demand(3, wanted=3), [MarkPodsReady(step="s0")], id="its pods train"),
        pytest.param(steps("admitted"), demand(3, wanted=3, running=2), [], id="its pods start"),
        pytest.param(steps("admitted"), demand(3, wanted=3, trains=False), [], id="no round trains"),
        pytest.param(
            steps("admitted", "admitted"), demand(4, running=3), [MarkPodsReady(step="s0")], id="the second one starts"
        ),
        pytest.param(steps("finished", "ready"), demand(3), [delete(0)], id="a foreign hand finished one"),
        pytest.param(steps("ready", "waits"), demand(3, is_over=True), [delete(1)], id="suspended or over: pods end"),
        pytest.param(
            steps("ready", "evicted"), demand(0, is_over=True), [delete(0), delete(1)], id="suspended or over"
        ),
    ],
)  # fmt: skip
def test_what_happens_to_steps(of_steps: dict[int, Workload], asked: Demand, expected: list[StepAction]) -> None:
    assert list(plan_steps(base(), of_steps, asked)) == expected


@pytest.mark.parametrize("of_base", [None, base("evicted"), base("waits"), base(template="old"), base(queue="team-b")])
def test_without_an_admitted_base_no_step_holds_quota(of_base: Workload | None) -> None:
    of_steps = steps("ready", "evicted", "waits")
    assert plan_steps(of_base, of_steps, demand(4)) == (delete(2),)  # it must not be admitted while the job ends
    assert plan_steps(of_base, of_steps, demand(0)) == (delete(0), delete(1), delete(2))
    assert plan_steps(of_base, {}, demand(0)) == ()


def test_the_last_step_that_a_job_may_have_asks_for_all_the_rest() -> None:
    full = steps(*["ready"] * (MOST_STEPS - 1))
    wanted = 2 + MOST_STEPS - 1 + 50
    created = plan_steps(base(), full, demand(2 + MOST_STEPS - 1, wanted=wanted, maximum=wanted))
    assert created[-1] == CreateStep(MOST_STEPS - 1, 50)


@pytest.mark.parametrize("wanted", [2, 3, 5, 8])
@pytest.mark.parametrize("live", range(9))
def test_what_a_job_keeps_has_quota_for_all_its_live_pods(wanted: int, live: int) -> None:
    states = ["ready", "evicted", "waits", "finished"]
    for sizes, chosen in product([(1, 2, 3), (3, 2, 1)], product(states, repeat=3)):
        of_steps = steps(*(workload(f"s{i}", s, n) for i, (s, n) in enumerate(zip(chosen, sizes, strict=True))))
        before = 2 + sum(step.count for step in of_steps.values() if step.reserved)
        if live > before:
            continue
        after = _applied(of_steps, plan_steps(base(), of_steps, demand(live, wanted=wanted)))
        held = 2 + sum(step.count - step.reclaimed for step in after.values() if step.reserved)
        assert live <= held
        assert admitted_pods(base(), after) <= held
        assert min(wanted, admitted_pods(base(), of_steps)) <= max(live, admitted_pods(base(), after))


def _applied(of_steps: Mapping[int, Workload], actions: tuple[StepAction, ...]) -> dict[int, Workload]:
    """Return the steps after these actions, as the API server and the operator's writes would leave them."""
    after = dict(of_steps)
    for action in actions:
        if isinstance(action, CreateStep):
            after[action.index] = workload(f"s{action.index}", "waits", action.count)
            continue
        name = action.name if isinstance(action, (DeleteWorkload, DeactivateStep)) else action.step
        index = int(name[1:])
        if isinstance(action, DeleteWorkload):
            del after[index]
        elif isinstance(action, ReleaseQuota):
            after[index] = workload(name, "released", after[index].count)
        elif isinstance(action, ReclaimPods):
            after[index] = replace(after[index], reclaimed=action.count)
        elif isinstance(action, MarkPodsReady):
            after[index] = workload(name, "ready", after[index].count, reclaimed=after[index].reclaimed)
    return after


# ---- with a queue


@dataclass
class Elastic:
    """A job with 2 to `wanted` pods whose pods start and end at once."""

    wanted: int
    live: int = 0
    base: Workload = field(default_factory=lambda: base("waits"))
    steps: dict[int, Workload] = field(default_factory=dict)

    def reconcile(self) -> bool:
        """Return whether something changed."""
        self.live, before = min(self.wanted, admitted_pods(self.base, self.steps)), (self.live, dict(self.steps))
        self.steps = _applied(self.steps, plan_steps(self.base, self.steps, demand(self.live, wanted=self.wanted)))
        return before != (self.live, self.steps)

    @property
    def held(self) -> int:
        return sum(w.count for w in (self.base, *self.steps.values()) if w.reserved)


def _admit(jobs: list[Elastic], quota: int) -> bool:
    """Do one turn of a queue as Kueue would: admit the first base that waits, else the first step; a base preempts the
    newest steps. Return whether something changed."""
    free = quota - sum(job.held for job in jobs)
    for job in jobs:
        if job.base.reserved:
            continue
        if job.base.count <= free:
            job.base = base("ready", job.base.count)
            return True
        admitted = [(other, i) for other in jobs for i, s in sorted(other.steps.items()) if s.admitted]
        leaving = sum(s.count for other in jobs for s in other.steps.values() if s.reserved and not s.admitted)
        if free + leaving < job.base.count and admitted:
            other, index = admitted[-1]
            other.steps[index] = workload(f"s{index}", "evicted", other.steps[index].count)
            return True
        return False
    for job in jobs:
        for index, step in sorted(job.steps.items()):
            if not step.reserved and step.count <= free:
                job.steps[index] = workload(step.name, "admitted", step.count)
                return True
    return False


def _settle(jobs: list[Elastic], quota: int) -> None:
    for _ in range(100):
        changed = _admit(jobs, quota)
        for job in jobs:
            changed |= job.reconcile()
            assert job.live <= job.held
        assert sum(job.held for job in jobs) <= quota
        if not changed:
            return
    pytest.fail("the jobs take each other's quota by turns")


def test_a_job_shrinks_for_another_and_both_come_to_rest() -> None:
    first, second = Elastic(wanted=8), Elastic(wanted=8)
    _settle([first], 8)
    assert first.live == 8
    _settle([first, second], 8)
    assert (first.live, second.live) == (6, 2)
    third = Elastic(wanted=2)
    _settle([first, second, third], 8)
    assert (first.live, second.live, third.live) == (4, 2, 2)


def test_a_job_grows_again_when_quota_is_free() -> None:
    first, urgent = Elastic(wanted=8), Elastic(wanted=4, base=base("waits", count=4))
    _settle([first], 8)
    _settle([first, urgent], 8)
    assert (first.live, urgent.live) == (4, 4)
    _settle([first], 8)
    assert first.live == 8


def test_a_job_is_at_its_minimum_when_all_steps_are_preempted() -> None:
    first, urgent = Elastic(wanted=8), Elastic(wanted=6, base=base("waits", count=6))
    _settle([first], 8)
    _settle([first, urgent], 8)
    assert (first.live, urgent.live) == (2, 6)


# ---- what it says


@pytest.mark.parametrize(
    ("of_steps", "words"),
    [
        (steps("ready", "ready"), ""),
        (steps(), "queue team-a has quota for 2 of 4 pods"),
        (steps("ready", "evicted"), "3 of 4 pods: Workload s1 was evicted (Preempted: for job urgent)"),
        (steps("waits", "ready"), "3 of 4 pods: Workload s0 waits: insufficient quota"),
        (steps(workload("s0", "ready", flavors=("a100",)), "ready"), "other Nodes (flavors or a topology)"),
        (steps(workload("s0", "waits", active=False), "ready"), "s0 is deactivated: set its spec.active to true"),
    ],
)
def test_the_message_says_how_many_pods_have_quota_and_why_not_all(of_steps: dict[int, Workload], words: str) -> None:
    message = describe_steps(base(), of_steps, 4)
    assert words in message
    assert bool(words) == bool(message)


def test_a_workload_names_the_flavors_of_its_worker_pods() -> None:
    assigned = [
        {"name": "worker", "flavors": {"cpu": "spot", "nvidia.com/gpu": "h100"}},
        {"name": "other", "flavors": {"cpu": "x"}},
    ]
    raw = {"metadata": {"name": "s0"}, "status": {"admission": {"podSetAssignments": assigned}}}
    assert parse_workload(raw).flavors == ("h100", "spot")

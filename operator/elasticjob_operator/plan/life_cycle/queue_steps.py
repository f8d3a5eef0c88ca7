"""Steps of an elastic job in a queue of Kueue: it shrinks where it would be evicted.

The job's Workload asks for the fewest pods only. Each step above it is a Workload of its own with a lower priority.
Kueue preempts such a step first and admits it again when quota is free; here the operator decides what follows from
that. It decides by what the cluster has and by nothing else, so that a new operator decides the same.

The rule of quota: a job never has more live pods than it has quota for. So an evicted step gives its quota back when
the pods that are left fit into the rest. It keeps its Workload and thus its place in the queue: two jobs of the same
priority do not take each other's quota by turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticjob._runtime.contract.text import with_noun
from elasticjob_operator.actions import (
    CreateStep,
    DeactivateStep,
    DeleteWorkload,
    MarkPodsReady,
    ReclaimPods,
    ReleaseQuota,
    StepAction,
)
from elasticjob_operator.model.cluster.workload import Workload, WorkloadCondition

USUAL_STEPS = 16
"""Into how many steps a job's pods above its minimum are split. Kueue admits one Workload of a queue at a time, and
each Workload has a copy of the pod template: 4096 steps of one pod would be 4096 turns, and tens of MB in etcd."""
MOST_STEPS = 2 * USUAL_STEPS
"""How many steps a job has at most. It has more than usual ones after it has given parts of some back."""


@dataclass(frozen=True)
class Demand:
    """What a job asks its queue for, and what it has. All numbers are worker pods."""

    queue: str
    template: str
    """The digest of its pod template."""
    priority_class: str
    """The name of the steps' class."""
    minimum: int
    maximum: int
    """The most that the spec permits, with spares."""
    wanted: int
    """How many it wants now, with spares: the quota may be for fewer."""
    live: int
    """How many it has that have not ended. They use quota, started or not."""
    running: int = 0
    """How many of these run."""
    trains: bool = False
    increment: int = 1
    is_over: bool = False
    """Whether it has ended, is suspended, or has no queue any more."""


def step_size(minimum: int, maximum: int, increment: int) -> int:
    """Return how many pods a step has: as few whole increments (at least one) as let USUAL_STEPS steps cover minimum to
    maximum."""
    increments = -(-max(0, maximum - minimum) // increment)
    return increment * max(1, -(-increments // USUAL_STEPS))


def admitted_pods(base: Workload | None, steps: Mapping[int, Workload]) -> int:
    """Return how many pods the job may have: 0 while its base Workload is not admitted, whatever its steps are."""
    if base is None or not base.admitted:
        return 0
    return _pods(base) + sum(_pods(step) for step in steps.values() if _is_usable(step, base))


def plan_steps(base: Workload | None, steps: Mapping[int, Workload], demand: Demand) -> tuple[StepAction, ...]:
    """Return what to do with the Workloads of the steps, in this order; they are by their index from 0.

    `base` is the Workload for the fewest pods. Call it only where all Workloads of the job are known.
    """
    ordered = [steps[index] for index in sorted(steps)]
    if demand.is_over or base is None or not base.admitted or _is_outdated(base, demand):
        # The job has to be without pods. A step that waits would be admitted for nothing.
        return tuple(_delete(step) for step in ordered if not step.reserved or demand.live == 0)
    needed = max(0, demand.wanted - _pods(base))
    actions, covered = _give_back(base, ordered, demand, needed)
    if actions:
        # It asks for more only after that: the names of its old steps are taken until then.
        return tuple(actions)
    return (*_mark_ready(base, ordered, demand), *_create(steps, demand, needed - covered))


def describe_steps(base: Workload, steps: Mapping[int, Workload], wanted: int) -> str:
    """Return how many of the wanted pods have quota, and why not all; empty if all have."""
    admitted = admitted_pods(base, steps)
    if admitted >= wanted:
        return ""
    problems = [_problem(steps[index], base) for index in sorted(steps)]
    why = next((problem for problem in problems if problem), "")
    usable = sum(_is_usable(step, base) for step in steps.values())
    counted = f"; {usable} of {with_noun(len(steps), 'step')} admitted" if steps else ""
    return f"queue {base.queue} has quota for {admitted} of {wanted} pods" + (f": {why}" if why else "") + counted


def _give_back(base: Workload, steps: list[Workload], demand: Demand, needed: int) -> tuple[list[StepAction], int]:
    """Return the actions that give back quota which the job may not use or does not need, and how many pods the
    remaining steps cover.

    Steps are used in this order: admitted, evicted just now, waiting. An evicted step gives back its quota but its
    Workload stays in the queue, so it still covers its pods.
    """
    actions: list[StepAction] = []
    reserved = _pods(base) + sum(_pods(step) for step in steps if step.reserved)
    covered = 0
    for step in sorted(steps, key=lambda step: (not _is_usable(step, base), not step.reserved)):
        needed_here = min(_pods(step), needed - covered)
        useless = needed_here <= 0 or _is_outdated(step, demand) or step.is_true(WorkloadCondition.FINISHED)
        if not step.reserved:
            # A waiting step that asks for the wrong number or with the wrong priority is replaced by a new one.
            if useless or needed_here < _pods(step) or step.priority_class != demand.priority_class:
                actions.append(_delete(step))
            else:
                covered += needed_here
            continue
        evicted = step.is_true(WorkloadCondition.EVICTED)
        surplus = _pods(step) if useless or evicted else _pods(step) - needed_here
        covered += 0 if useless else needed_here
        if not useless and not evicted and step.active and not _fits(step, base):
            actions.append(DeactivateStep(step.name, step.uid))
        elif surplus > 0 and demand.live <= reserved - surplus:
            reserved -= surplus
            actions.append(_give(step, surplus, useless=useless, evicted=evicted))
    return actions, covered


def _give(step: Workload, surplus: int, *, useless: bool, evicted: bool) -> StepAction:
    # Kueue keeps what was reclaimed: a step that stays in the queue would ask for fewer pods for ever.
    if useless or (evicted and step.reclaimed):
        return _delete(step)
    return ReleaseQuota(step.name) if evicted else ReclaimPods(step.reclaimed + surplus, step.name)


def _mark_ready(base: Workload, steps: list[Workload], demand: Demand) -> list[StepAction]:
    """A step's pods run once the job trains with as many as the base and all steps before it have, and its own.

    It is never taken back: lost pods are the base's matter, and a step would be evicted although the job trains.
    """
    actions: list[StepAction] = []
    reached = _pods(base)
    for step in (step for step in steps if _is_usable(step, base)):
        reached += _pods(step)
        started = demand.trains and demand.running >= min(reached, demand.wanted)
        if started and not step.is_true(WorkloadCondition.PODS_READY):
            actions.append(MarkPodsReady(step=step.name))
    return actions


def _create(steps: Mapping[int, Workload], demand: Demand, missing: int) -> list[StepAction]:
    """Ask for the pods that no step asks for. The last step that a job may have asks for all of them."""
    free = [index for index in range(MOST_STEPS) if index not in steps]
    size = step_size(demand.minimum, demand.maximum, demand.increment)
    actions: list[StepAction] = []
    for index in free:
        if missing <= 0:
            break
        count = missing if index == free[-1] else min(size, missing)
        actions.append(CreateStep(index, count))
        missing -= count
    return actions


def _pods(workload: Workload) -> int:
    """Return for how many pods a Workload has quota, or asks."""
    count = workload.count if workload.admitted_count is None else min(workload.count, workload.admitted_count)
    return max(0, count - workload.reclaimed) if workload.reserved else workload.count


def _is_usable(step: Workload, base: Workload) -> bool:
    """Return whether the job may have pods for a step. All its pods are alike, so that those of each step fit."""
    same = step.queue == base.queue and step.template == base.template
    return step.admitted and step.active and same and _fits(step, base)


def _fits(step: Workload, base: Workload) -> bool:
    """Return whether the admission of a step puts its pods where those of the base are."""
    return not step.has_topology and step.flavors == base.flavors


def _is_outdated(workload: Workload, demand: Demand) -> bool:
    """Return whether a Workload is in another queue, or asks for other pods, than the job does now."""
    return workload.queue != demand.queue or workload.template != demand.template


def _delete(step: Workload) -> StepAction:
    return DeleteWorkload(step.name, step.uid)


def _problem(step: Workload, base: Workload) -> str:
    """Return why the job has no pods for a step; empty if it has, or if Kueue has not said yet."""
    if _is_usable(step, base):
        return ""
    evicted = step.conditions.get(WorkloadCondition.EVICTED)
    pending = step.conditions.get(WorkloadCondition.QUOTA_RESERVED)
    if step.reserved and not _fits(step, base):
        return f"Workload {step.name} was admitted to other Nodes (flavors or a topology) than Workload {base.name}"
    if not step.active:
        return f"Workload {step.name} is deactivated: set its spec.active to true"
    if evicted is not None and evicted.true:
        return f"Workload {step.name} was evicted ({evicted.reason}: {evicted.message})"
    return f"Workload {step.name} waits: {pending.message}" if pending is not None and not pending.true else ""

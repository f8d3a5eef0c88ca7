"""The number of workers per node, nodes and restarts of a converted job. Pure."""

from __future__ import annotations

import re

from elasticjob._runtime.contract.commands.torchrun_command import NPROC_PER_NODE
from elasticjob.convert.draft import JobDraft
from elasticjob.convert.parts.fields import Notes
from elasticjob.convert.parts.pod_template import TrainingTemplate

_NUMBER = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")


def put_workers(draft: JobDraft, trained: TrainingTemplate, field: int | str | None, source: str, notes: Notes) -> None:
    """Write nprocPerNode, and a hangPolicy if the command had one.

    `field`: the number, or `auto`, `gpu` or `cpu`, in the input at `source`; None if absent.
    """
    asked = trained.command.options.get(NPROC_PER_NODE) or trained.env.get("PET_NPROC_PER_NODE") or field
    number = int(str(asked)) if _NUMBER.fullmatch(str(asked)) else asked
    gpus = trained.devices.gpus
    if trained.command.progress_timeout is not None:
        where = f"{trained.path}.command"
        draft.put_number("hangPolicy.progressTimeoutSeconds", trained.command.progress_timeout, where)
    if trained.command.uses_torchrun:
        if number not in (None, "auto") and "$" not in str(number):
            draft.put("nprocPerNode", number)
        elif not gpus and number in (None, "auto"):
            notes.add(source, "torchrun's auto is one worker for each processor without GPUs, elasticjob's is 1: set"
                              " spec.nprocPerNode to a number, or to cpu for the requested processors")  # fmt: skip
        return
    if trained.command.becomes_rank:
        if isinstance(number, int) or number in ("gpu", "cpu"):
            draft.put("nprocPerNode", number)
    elif trained.command.starts_workers:
        draft.put("nprocPerNode", 1)
    elif isinstance(number, int) and number > 1:
        draft.put("nprocPerNode", number)
        notes.add(source, f"elasticjob starts the command {number} times in each pod, once for each worker: write 1"
                          " in spec.nprocPerNode if it starts its own workers")  # fmt: skip
    elif gpus > 1:
        draft.put("nprocPerNode", 1)
        notes.add(f"{trained.path}.command", f"it runs once in each pod, as spec.nprocPerNode: 1 says; remove that for"
                                             f" one worker for each of the {gpus} GPUs")  # fmt: skip
    elif number in ("cpu", 1):
        draft.put("nprocPerNode", 1)


def put_nodes(
    draft: JobDraft,
    replicas: int,
    bounds: tuple[int | None, int | None],
    trained: TrainingTemplate,
    source: str,
    notes: Notes,
) -> None:
    """Write replicas and elasticPolicy. `bounds`: minimum and maximum in the input; both None for a fixed size."""
    low, high = bounds
    in_command = _torchrun_bounds(trained)
    if low is None and high is None:
        low, high = in_command
    elif in_command not in ((None, None), bounds):
        notes.add(f"{trained.path}.command", "--nnodes has no effect: the job's elastic policy has other numbers")
    if low is None and high is None:
        draft.put("replicas", replicas)
        return
    low = low if low is not None else high
    high = high if high is not None else low
    assert low is not None  # noqa: S101
    assert high is not None  # noqa: S101
    target = min(max(replicas, low), max(low, high))
    if target != replicas:
        notes.add(source, f"{replicas} nodes are outside of {low} to {high}: spec.replicas is {target}")
    draft.put("replicas", target)
    draft.put("elasticPolicy.minReplicas", low)
    draft.put("elasticPolicy.maxReplicas", high)


def _torchrun_bounds(trained: TrainingTemplate) -> tuple[int | None, int | None]:
    """Return MIN and MAX of torchrun's --nnodes=MIN:MAX; None for a fixed number."""
    match = _RANGE.fullmatch(trained.command.options.get("nnodes", ""))
    if match is None or match[2] is None or match[1] == match[2]:
        return None, None
    return int(match[1]), int(match[2])


def put_max_restarts(draft: JobDraft, limits: dict[str, int | None], trained: TrainingTemplate, notes: Notes) -> bool:
    """Write failurePolicy.maxRestarts and return whether the input has a limit.

    `limits`: numbers in the input by their paths, the one that counts first. torchrun's own option comes before them.
    """
    in_command, in_env = trained.command.options.get("max-restarts"), trained.env.get("PET_MAX_RESTARTS")
    asked = {f"{trained.path}.command": in_command, f"{trained.path}.env": in_env}
    found = {path: int(text) for path, text in asked.items() if text and _NUMBER.fullmatch(text)}
    found |= {path: number for path, number in limits.items() if number is not None}
    for i, (path, number) in enumerate(found.items()):
        if i == 0:
            draft.put_number("failurePolicy.maxRestarts", number, path)
        elif number != next(iter(found.values())):
            notes.add(path, f"has no effect: {next(iter(found))} sets the job's budget of restarts")
    return bool(found)

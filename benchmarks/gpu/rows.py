"""The steps of `make gpu` and the rows that they measure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gpu import one_job, weights
from benchmarks.gpu.one_job import RANKS, Scale
from benchmarks.row import Row, Sample

Samples = Mapping[str, list[Sample]]
"""By the name of the row."""
_COMMIT = re.compile(r"commit (\d+) seconds=([\d.]+)")
_STEPS = re.compile(r"steps alone=([\d.]+) beside=([\d.]+)")
_BLOCK = re.compile(r"block plain=([\d.]+) watched=([\d.]+) batch=(\d+)")
RECOVERS = 40.0
"""Seconds within which a job must be back at full size."""
TORCHRUN_RECOVERS = 45.0
SPARES_READY = 40.0
SCRIPT_ENDS = 120.0
"""Seconds; the limit of the step may be shorter."""
LAST_COMMITS = 8
"""Commits that count: memory is registered with the driver in the background, beside those before."""


@dataclass(frozen=True)
class Step:
    """One part of `make gpu`, a process of its own."""

    name: str
    limit: float
    """Seconds after which it is ended."""
    measure: Callable[[Path, Scale], Samples]
    """Takes the samples of its rows. The argument is an empty folder."""
    rows: tuple[str, ...]
    """Their names."""
    together: bool = False
    """Whether it may run beside other steps: it measures no time."""
    optional: bool = False
    """Whether it is left out, without being missed, if no time is left."""


def _row(
    name: str,
    title: str,
    unit: str,
    want: float | None,
    *,
    more_is_better: bool = False,
    note: str = "",
) -> Row:
    return Row(f"gpu-{name}", title, unit, want, {}, {}, 0, more_is_better, note)


_WRONG = "wrong weights after a kill in process"
ROWS = {
    row.name: row
    for row in [
        _row(
            "weights-ahead",
            f"{_WRONG}, the loop never waits for the device: recoveries",
            "",
            0,
            note="Three ranks. Small integers are gradients, so that the weights of each step are known exactly.",
        ),
        _row("weights-resized", f"{_WRONG}, the same where two ranks may go on without the third: recoveries", "", 0),
        _row("weights-item", f"{_WRONG}, the loop reads each loss after `state.step += 1`: recoveries", "", 0),
        _row("raises", "in process: a rank raises, until the first step of all", "s", 0.35),
        _row("killed", "in process: a rank is killed, pause of the others", "s", 0.6),
        _row("joins-again", "in process: a rank was killed, pause of the others when the new process joins", "s", 0.6),
        _row("killed-with-spare", "in process: a rank with a spare process is killed, pause of the others", "s", 0.6),
        _row("killed-by-processes", "by processes: a worker is killed, until the first step of all", "s", 2.0),
        _row(
            "killed-torchrun",
            "stock torchrun, best settings: a worker is killed, until the first step of all",
            "s",
            None,
        ),
        _row("commit", "commit of a State of 2 GiB", "GB/s", 45.0, more_is_better=True),
        _row("commit-beside", "step of 0.1 s beside `commit(non_blocking=True)` of 2 GiB: longer by", "%", 10.0),
        _row("guard", "step of 0.1 s of four ranks with a State: longer than without by", "%", 1.0),
        _row("guard-alone", "step of 0.1 s of one rank with a State: longer than without by", "%", 1.0),
    ]
}
SEEN = {
    "gpu-weights-ahead": "3 of 3",
    "gpu-weights-item": "3 of 3",
    "gpu-raises": "0.89 s",
    "gpu-killed": "3.9 to 5.9 s",
    "gpu-killed-with-spare": "never",
    "gpu-killed-by-processes": "2.7 s",
    "gpu-killed-torchrun": "12.9 s",
    "gpu-commit": "14.5 GB/s",
    "gpu-commit-beside": "71 %",
}
"""Single samples of one H100 and earlier code, torch 2.11, NCCL 2.28.9."""


def faults_in_process(folder: Path, scale: Scale) -> Samples:
    with one_job.training(one_job.ours(folder, *scale.options)) as side:
        raised = [one_job.inject(side, one_job.raises(1 + i % 3), RECOVERS) for i in range(scale.faults)]
        killed = [one_job.inject(side, one_job.killed(1 + i % 3), RECOVERS) for i in range(scale.faults)]
    after_fault, joins = one_job.pauses(killed)
    samples = {"gpu-raises": [Sample(each.first_step_of_all) for each in raised], "gpu-killed": after_fault}
    return {**samples, "gpu-joins-again": joins} if joins else samples


def killed_with_spare(folder: Path, scale: Scale) -> Samples:
    found = []
    with one_job.training(one_job.ours(folder, "spare", *scale.options)) as side:
        for number in range(scale.faults):
            one_job.wait_for_spares(side, number, SPARES_READY)
            found.append(one_job.inject(side, one_job.killed(1 + number % 3), RECOVERS))
    return {"gpu-killed-with-spare": one_job.pauses(found)[0]}


def killed_by_processes(folder: Path, scale: Scale) -> Samples:
    with one_job.training(one_job.ours(folder, "plain", *scale.options)) as side:
        found = [one_job.inject(side, one_job.killed(1 + i % 3), RECOVERS) for i in range(scale.faults)]
    return {"gpu-killed-by-processes": [Sample(each.first_step_of_all) for each in found]}


def killed_under_torchrun(folder: Path, scale: Scale) -> Samples:
    with one_job.training(one_job.torchrun(folder, *scale.options)) as side:
        found = one_job.inject(side, one_job.killed(1), TORCHRUN_RECOVERS)
    return {"gpu-killed-torchrun": [Sample(found.first_step_of_all)]}


def commits(folder: Path, scale: Scale) -> Samples:
    arguments = [str(scale.state_bytes), str(scale.step_seconds)]
    lines = one_job.run_script(folder, "commit_state", "all commits measured", 1, arguments, SCRIPT_ENDS)
    return {"gpu-commit": [speed(lines, scale.state_bytes)], "gpu-commit-beside": [longer(lines)]}


def speed(lines: Iterable[str], size: int) -> Sample:
    """Return the speed of the last commits, in GB (1e9 bytes) a second."""
    found = [float(match[2]) for line in lines if (match := _COMMIT.search(line))]
    return Sample(size / 1e9 / median(found[-LAST_COMMITS:]), parts={"first commit, s": found[0]})


def longer(lines: Iterable[str]) -> Sample:
    """Return by how much longer a step is beside a commit, in percent of one without."""
    pairs = [(float(match[1]), float(match[2])) for line in lines if (match := _STEPS.search(line))]
    return _percent(pairs, "step, s", "step beside a commit, s")


def guard(folder: Path, scale: Scale, row: str, nodes: int) -> Samples:
    arguments = [str(scale.step_seconds), *scale.options]
    lines = one_job.run_script(folder, "guard_cost", "all blocks measured", nodes, arguments, SCRIPT_ENDS)
    return {row: [cost(lines)]}


def cost(lines: Iterable[str]) -> Sample:
    """Return by how much longer a step is with a State, in percent of one without."""
    found = [match for line in lines if (match := _BLOCK.search(line))]
    return _percent([(float(match[1]), float(match[2])) for match in found], "step, s", "step with a State, s")


def _percent(pairs: list[tuple[float, float]], first: str, second: str) -> Sample:
    parts = {first: median(pair[0] for pair in pairs), second: median(pair[1] for pair in pairs)}
    return Sample(median(100 * (more / alone - 1) for alone, more in pairs), parts=parts)


def _weights_step(name: str, *, mode: str, fewest: int) -> Step:
    row = f"gpu-weights-{name}"

    def measure(folder: Path, scale: Scale) -> Samples:
        return {row: [weights.measure(folder, scale, mode, fewest)]}

    return Step(f"weights-{name}", 150, measure, (row,), together=True)


STEPS = [
    _weights_step("ahead", mode="ahead", fewest=3),
    _weights_step("resized", mode="ahead", fewest=2),
    _weights_step("item", mode="item", fewest=3),
    Step("in-process", 90, faults_in_process, ("gpu-raises", "gpu-killed", "gpu-joins-again")),
    Step("spare", 80, killed_with_spare, ("gpu-killed-with-spare",)),
    Step("by-processes", 50, killed_by_processes, ("gpu-killed-by-processes",)),
    Step("commit", 40, commits, ("gpu-commit", "gpu-commit-beside")),
    Step("guard", 50, partial(guard, row="gpu-guard", nodes=RANKS), ("gpu-guard",)),
    Step("guard-alone", 30, partial(guard, row="gpu-guard-alone", nodes=1), ("gpu-guard-alone",)),
    Step("torchrun", 75, killed_under_torchrun, ("gpu-killed-torchrun",), optional=True),
]
ORDER = {name: position for position, name in enumerate(ROWS)}

"""The time of `State.commit` with 1 GB of tensors, beside a plain copy of as many bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.ours import output_of
from benchmarks.row import OURS, Row, Sample

_SCRIPT = str(Path(__file__).with_name("large_state.py"))
_FIRST = re.compile(r"first commit=([\d.]+)")
_END = "all commits measured"
_STEPS = re.compile(r"steps alone=([\d.]+) beside=([\d.]+) memcpy=([\d.]+)")
_PAIR = re.compile(r"pair commit=([\d.]+) memcpy=([\d.]+)")


def commit(folder: Path) -> Sample:
    """Run the script under an agent, as its memory holds the copies in a job."""
    lines = output_of(folder, _SCRIPT, _END, nodes=1)
    return Sample(None, "the script did not end") if lines is None else ratio(lines)


def ratio(lines: Iterable[str]) -> Sample:
    """Return the median ratio of a commit's time to that of the copy beside it, from the lines of the script."""
    texts = list(lines)
    pairs = [(float(m[1]), float(m[2])) for text in texts if (m := _PAIR.search(text))]
    first = next(float(m[1]) for text in texts if (m := _FIRST.search(text)))
    parts = {
        "commit, s": median(commit for commit, _ in pairs),
        "copy, s": median(copy for _, copy in pairs),
        "first commit, s": first,
    }
    return Sample(median(commit / copy for commit, copy in pairs), parts=parts)


def beside_steps(folder: Path) -> Sample:
    """Run the script with steps that a commit goes on beside."""
    lines = output_of(folder, _SCRIPT, _END, nodes=1, arguments=["steps"])
    return Sample(None, "the script did not end") if lines is None else longer(lines)


def longer(lines: Iterable[str]) -> Sample:
    """Return by how many copies a step is longer beside a commit, the median, from the lines of the script."""
    steps = [tuple(map(float, m.groups())) for text in lines if (m := _STEPS.search(text))]
    parts = {
        "step, s": median(alone for alone, _, _ in steps),
        "step beside a commit, s": median(beside for _, beside, _ in steps),
        "copy, s": median(copy for _, _, copy in steps),
    }
    return Sample(median((beside - alone) / copy for alone, beside, copy in steps), parts=parts)


ROWS = [
    Row(
        "commit-1gb",
        "commit of a State with 1 GB, as a multiple of a memcpy of 1 GB",
        "x",
        1.3,
        {OURS: commit},
        {OURS: 3},
        60,
        note="The first commit also gets the memory from the kernel.",
    ),
    Row(
        "commit-1gb-non-blocking",
        "step of 1 s beside `commit(non_blocking=True)` of 1 GB: longer by, as a multiple of a memcpy of 1 GB",
        "x",
        None,
        {OURS: beside_steps},
        {OURS: 3},
        100,
        note="One of the two cores trains and the other one copies: they share the memory's bandwidth.",
    ),
]

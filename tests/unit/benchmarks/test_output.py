"""The events that benchmarks read from a script's output."""

from __future__ import annotations

import os

from benchmarks.output import Output
from benchmarks.row import Sample, middle


def collect(text: str) -> Output:
    """Return an Output that has read this text."""
    read, write = os.pipe()
    output = Output()
    output.follow("node", os.fdopen(read, "rb"))
    os.write(write, text.encode())
    os.close(write)
    lines = text.count("\n")
    assert output.wait(lambda: len(output.lines) == lines, 10)
    return output


def test_steps_are_found_after_a_launchers_prefix() -> None:
    output = collect(
        "[default0]:step=7 rank=0 world=4 pid=12 at=1.500000\nnoise\nimported rank=1 world=4 pid=13 at=1.0\n"
    )
    [step] = output.steps()
    assert (step.step, step.world, step.pid, step.time) == (7, 4, 12, 1.5)
    assert output.workers() == {(12, 1), (13, 1)}


def test_steps_of_the_old_world_can_be_left_out() -> None:
    output = collect("step=7 rank=0 world=4 pid=12 at=1.5\nstep=1 rank=0 world=3 pid=22 at=2.5\n")
    assert [s.pid for s in output.steps(excluding=frozenset({(12, 1)}), world=3, after=2.0)] == [22]
    assert output.pid_of(0) == 22


def test_another_call_in_the_same_process_is_another_worker() -> None:
    output = collect("step=7 rank=0 world=4 pid=12 call=1 at=1.5\nstep=8 rank=0 world=4 pid=12 call=2 at=2.5\n")
    assert [s.step for s in output.steps(excluding=frozenset({(12, 1)}))] == [8]


def test_a_sample_without_a_value_counts_as_the_slowest() -> None:
    never, fast, slow = Sample(None, "never"), Sample(1.0), Sample(2.0)
    assert middle([never, fast, slow]) == 2.0
    assert middle([never, never, fast]) is None

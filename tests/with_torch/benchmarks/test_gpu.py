"""`make gpu`: what it reads from outputs and writes. tests/integration/test_gpu_rehearsal.py runs its programs."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import gpu_tests, page, processes, rows, weights
from benchmarks.gpu.pauses import Recovery, recovery_of
from benchmarks.output import ScriptEvent
from benchmarks.row import Sample
from benchmarks.run import save

pytestmark = pytest.mark.torch

H100: dict[str, Any] = {
    "device": "NVIDIA H100 80GB HBM3", "cores": 16, "memory": "126 GiB", "torch": "2.11.0", "nccl": "2.28.9",
    "python": "3.12.3", "day": "2026-11-26",
}  # fmt: skip
COMMIT = next(step for step in rows.STEPS if step.name == "commit")
OPTIONS = argparse.Namespace(cpu=False)


def step(rank: int, time: float, *, pid: int = 0, call: int = 1, world: int = 2) -> ScriptEvent:
    return ScriptEvent("step", 7, rank, world, pid or 100 + rank, time, call)


BEFORE = [step(0, 1.0), step(1, 1.1), step(0, 2.0), step(1, 2.1)]


def test_no_recovery_while_a_rank_has_made_no_step_of_the_new_round() -> None:
    assert recovery_of([*BEFORE, step(0, 4.0, call=2)], 3.0, 2) is None


def test_a_raise_costs_until_the_first_step_of_the_last_rank() -> None:
    new = [step(0, 4.0, call=2), step(1, 4.5, call=2), step(0, 5.0, call=2)]
    assert recovery_of([*BEFORE, *new], 3.0, 2) == Recovery(1.5, (2.4,))


def test_ranks_that_have_waited_for_a_new_process_have_one_pause() -> None:
    new = [step(0, 4.0, call=2), step(1, 4.0, pid=200)]
    assert recovery_of([*BEFORE, *new], 3.0, 2) == Recovery(1.0, (2.0,))


def test_ranks_that_have_gone_on_have_another_pause_when_the_new_process_joins() -> None:
    alone = [step(0, 2.5, call=2, world=1), step(0, 6.0, call=2, world=1)]
    full = [step(0, 6.5, call=3), step(1, 6.4, pid=200), step(0, 8.0, call=4)]
    recovery = recovery_of([*BEFORE, *alone, *full], 2.2, 2)
    assert recovery is not None
    assert recovery.pauses == (0.5, 0.5)
    assert recovery.first_step_of_all == pytest.approx(4.3)


def test_new_processes_of_all_ranks_pause_for_no_rank() -> None:
    new = [step(0, 4.0, pid=200), step(1, 4.0, pid=201)]
    assert recovery_of([*BEFORE, *new], 3.0, 2) == Recovery(1.0, ())


def check(rank: int, round_id: str = "1.0.2", *, at: int = 5, error: str = "0", total: str = "-30") -> str:
    where = f"rank={rank} world=3 pid=1{rank} round={round_id}"
    return f"[default0]:CHECK {where} step={at} had=4 error={error} weights={total}"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([check(0), check(1), check(2)], ""),
        ([check(0), check(1, error="2"), check(2)], "weights differ by 2 from those of step 5"),
        ([check(0, error="nan")], "weights differ by nan from those of step 5"),
        ([check(0), check(1, at=6)], "ranks differ: steps [5, 6], sums ['-30']"),
        ([check(0), check(1, total="-31")], "ranks differ: steps [5], sums ['-30', '-31']"),
        ([check(0), check(1, "1.0.3", at=6, total="-36")], ""),
    ],
)
def test_what_is_wrong_after_a_kill(lines: list[str], problem: str) -> None:
    found = weights.problems(weights.checks_in(["another line", *lines]))
    assert found == ({"1.0.2": problem} if problem else {})


def test_a_round_runs_once_all_its_ranks_do() -> None:
    lines = [f"RUNS rank={rank} world=3 pid=1{rank} round=1.0.1" for rank in range(3)]
    assert weights.running_round(lines) == {0: 10, 1: 11, 2: 12}
    assert weights.running_round([*lines, "RUNS rank=0 world=3 pid=10 round=1.0.2"]) == {}
    assert weights.running_round([]) == {}


def test_figures_of_scripts() -> None:
    commits = [f"commit {i} seconds={2.0 if i == 0 else 0.5}" for i in range(12)]
    assert rows.speed(commits, 10**9) == Sample(2.0, parts={"first commit, s": 2.0})
    assert rows.longer(["steps alone=0.1 beside=0.11"]).value == pytest.approx(10)
    assert rows.cost(["block plain=0.1 watched=0.099 batch=8"]).value == pytest.approx(-1)


ENDLESS = """
import subprocess, sys
print("begun")
subprocess.run([sys.executable, "-c", "import signal; signal.pause()"])
"""


def test_a_command_beyond_its_limit_is_killed_with_its_children() -> None:
    """Its child has the output open: the command has not ended while the child lives."""
    shown: list[str] = []
    ended = processes.run([sys.executable, "-c", ENDLESS], 1.0, show=shown.append)
    assert ended.problem == "did not end within 1 s"
    assert shown == ["begun"] == ended.text.splitlines()


def test_an_exit_code_is_a_problem() -> None:
    assert processes.run([sys.executable, "-c", "raise SystemExit(3)"], 60, show=print).problem == "exit code 3"


def test_a_step_that_fails_has_rows_without_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run has measured does not stay there."""
    rows_of_step = [rows.ROWS[name] for name in COMMIT.rows]
    for row in rows_of_step:
        save(row, {"ours": [Sample(1.0)]}, H100, 9.0, "make gpu", tmp_path)
    monkeypatch.setattr(program, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(5)"])
    problem = program._measure(COMMIT, OPTIONS, H100, tmp_path, tmp_path, time.monotonic() + 60)
    assert problem == "commit (exit code 5)"
    assert [(f["row"], f["sides"]["ours"]["median"]) for f in page.load(tmp_path)] == [
        ("gpu-commit", None),
        ("gpu-commit-beside", None),
    ]


@pytest.mark.parametrize(("name", "problem"), [("commit", "commit (no time was left)"), ("torchrun", "")])
def test_no_step_begins_without_time(name: str, problem: str, tmp_path: Path) -> None:
    step = next(step for step in rows.STEPS if step.name == name)
    assert program._measure(step, OPTIONS, H100, tmp_path, tmp_path, time.monotonic() + 5) == problem


def test_wrong_weights_fail_and_a_missed_goal_does_not() -> None:
    weights_step = next(step for step in rows.STEPS if step.name == "weights-ahead")
    wrong = {"gpu-weights-ahead": [Sample(1.0, "ranks differ")]}
    assert program._wrong_weights(weights_step, wrong) == "wrong weights: ranks differ"
    assert program._wrong_weights(weights_step, {"gpu-weights-ahead": [Sample(0.0)]}) == ""
    assert program._wrong_weights(COMMIT, {"gpu-commit": [Sample(1.0)]}) == ""


def ended(text: str, problem: str = "") -> processes.Ended:
    return processes.Ended(problem, text, 1.0)


def test_a_skipped_test_has_failed_unless_it_is_a_rehearsal() -> None:
    skipped = ended("SKIPPED [1] tests/gpu/conftest.py:42: no NVIDIA GPU on this machine\n1 skipped in 0.1s")
    assert gpu_tests.outcome_of(skipped, rehearsal=True) == "skipped"
    assert gpu_tests.outcome_of(skipped, rehearsal=False) == "FAILED (skipped: no NVIDIA GPU on this machine)"
    assert gpu_tests.outcome_of(ended("1 passed in 0.1s"), rehearsal=False) == "passed"
    assert gpu_tests.outcome_of(ended("1 failed", "exit code 1"), rehearsal=True) == "FAILED (exit code 1)"


def test_tests_are_those_that_pytest_lists() -> None:
    listed = "tests/gpu/test_a.py::test_b[c d]\ntests/gpu/test_a.py::test_e\n\n2 tests collected in 0.1s"
    assert gpu_tests.test_ids(listed) == ["tests/gpu/test_a.py::test_b[c d]", "tests/gpu/test_a.py::test_e"]


def test_the_page_names_the_card_and_what_was_not_run(tmp_path: Path) -> None:
    save(rows.ROWS["gpu-raises"], {"ours": [Sample(0.3), Sample(0.2)]}, H100, 9.0, "make gpu ROWS=in-process", tmp_path)
    save(rows.ROWS["gpu-commit"], {"ours": [Sample(44.0)]}, H100, 9.0, "make gpu ROWS=commit", tmp_path)
    save(rows.ROWS["gpu-guard"], {"ours": [Sample(None, "broken")]}, H100, 9.0, "make gpu ROWS=guard", tmp_path)
    text = page.part(page.load(tmp_path))
    assert "one NVIDIA H100 80GB HBM3, 16 cores, 126 GiB, torch 2.11.0, NCCL 2.28.9, Python 3.12.3, 2026-11-26" in text
    assert "10 of the rows have not been run on the current code." in text
    assert "| in process: a rank raises, until the first step of all | **0.25 s** ✓ | ≤ 0.35 s | 0.89 s |" in text
    assert "| commit of a State of 2 GiB | **44 GB/s** ✗ | ≥ 45 GB/s | 14.5 GB/s |" in text
    assert "| step of 0.1 s of four ranks with a State: longer than without by | **never** ✗ | ≤ 1 % |  |" in text
    assert "- `gpu-guard`: broken" in text


def test_the_page_says_that_nothing_was_run() -> None:
    assert "These rows have not been run on the current code, because no GPU was at hand." in page.part([])
    assert page.part([]).count("| not run |") == len(rows.ROWS)


def test_the_gpu_part_is_replaced_where_it_stands() -> None:
    old = f"# Benchmarks\n\n{page.part([])}\n## More\n"
    new = page.replace(old, f"{page.BEGIN}\nnew\n{page.END}\n")
    assert new == f"# Benchmarks\n\n{page.BEGIN}\nnew\n{page.END}\n\n## More\n"
    assert page.replace("# Benchmarks\n", page.part([])) == f"# Benchmarks\n\n{page.part([])}"


def test_the_page_in_docs_has_the_gpu_part() -> None:
    text = (Path(__file__).parents[3] / "docs/contribute/benchmarks.md").read_text()
    assert page.part(page.load(Path(page.__file__).parents[1] / "results")) in text


def test_each_row_is_of_one_step() -> None:
    assert sorted(row for each in rows.STEPS for row in each.rows) == sorted(rows.ROWS)
    assert rows.SEEN.keys() <= rows.ROWS.keys()


def test_an_interruption_ends_what_runs_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_stopped", threading.Event())
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(processes.run, [sys.executable, "-c", ENDLESS], 60, show=lambda _: begun.set())
        assert begun.wait(60)
        processes.stop()
        assert running.result(30).problem
    assert processes.run([sys.executable, "-c", ""], 60).problem == "was not begun"

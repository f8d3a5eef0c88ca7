"""Run tests/gpu, several tests at a time, each in a process and a folder of its own: `pytest-xdist` is not needed."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import processes

ROOT = Path(__file__).parents[2]
NEEDS = ("pytest", "yaml")
LIMIT = 110.0
"""Seconds of one test."""
SHOWN = 120
"""Lines of the output of a test that has failed."""
REHEARSAL = "ELASTICJOB_GPU_REHEARSAL"
"""Set: tests that can also use the CPU do so, others are skipped."""
# Without the conftest.py of all tests, which needs hypothesis.
_PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--confcutdir={ROOT / 'tests' / 'gpu'}")


def main(folder: Path, together: int, rehearsal: bool) -> int:
    """Run all tests; return how many have failed. A test that is skipped on a GPU has failed too."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        print(f"tests/gpu need {' and '.join(missing)}, which this Python does not have: they were not run")
        return 1
    environ = {REHEARSAL: "1"} if rehearsal else {}
    collected = processes.run([*_PYTEST, "--collect-only", "-q", "tests/gpu"], LIMIT, environ, show=lambda _: None)
    tests = test_ids(collected.text)
    if collected.problem or not tests:
        print(f"{collected.text}\ncannot collect tests/gpu: {collected.problem or 'there are none'}")
        return 1
    print(f"{len(tests)} tests, {together} at a time", flush=True)

    def run(number: int) -> bool:
        command = [*_PYTEST, "-rs", f"--basetemp={folder / str(number)}", tests[number]]
        ended = processes.run(command, LIMIT, environ, show=lambda _: None)
        outcome = outcome_of(ended, rehearsal)
        shown = "" if outcome in ("passed", "skipped") else f"\n{_last(ended.text)}"
        print(f"{outcome}: {tests[number]} ({ended.seconds:.0f} s){shown}", flush=True)
        return not shown

    with ThreadPoolExecutor(together) as pool:
        good = list(pool.map(run, range(len(tests))))
    print(f"{good.count(True)} of {len(tests)} tests passed{' or were skipped' if rehearsal else ''}", flush=True)
    return good.count(False)


def test_ids(text: str) -> list[str]:
    """Return the tests in the output of `pytest --collect-only -q`."""
    return [line for line in text.splitlines() if re.match(r"tests/\S+\.py::", line)]


def outcome_of(ended: processes.Ended, rehearsal: bool) -> str:
    """Return `passed` or `skipped`, or why the test has failed."""
    if ended.problem:
        return f"FAILED ({ended.problem})"
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", ended.text, re.MULTILINE)
    if not reasons:
        return "passed"
    return "skipped" if rehearsal else f"FAILED (skipped: {'; '.join(reasons)})"


def _last(text: str) -> str:
    lines: Sequence[str] = text.splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN:])

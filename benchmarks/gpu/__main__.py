"""Run tests/gpu, the check of exact weights and the rows on this machine's GPU: `make gpu`, in six minutes.

Each step is a process of its own with a time limit. One that fails does not stop the others; the exit status is 1 then,
and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import gpu_tests, one_job, page, processes
from benchmarks.gpu.one_job import ON_CPU, ON_GPU, Scale
from benchmarks.gpu.rows import ROWS, STEPS, Samples, Step
from benchmarks.row import OURS, Sample, middle
from benchmarks.run import exit_on_sigterm, format_value, save

ROOT = Path(__file__).parents[2]
TESTS = "tests"
TESTS_LIMIT = 170.0
TOGETHER = 5
"""Tests at a time, on 16 cores: each has up to four ranks."""
LEAST = 10.0
"""Seconds that must be left for a step to begin."""
NO_GPU = 2
MINUTES, MINUTES_ON_CPU = 6.0, 15.0
SLOWER = 2.0
"""Each step of a rehearsal may take this times its limit: on two cores the ranks take turns."""
NAMES = [TESTS, *(step.name for step in STEPS)]


def main() -> int:
    options = _options()
    exit_on_sigterm()
    os.chdir(ROOT)
    one_job.use_paths()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.step:
        return _run_step(options.step, options)
    device = processes.run(
        [sys.executable, "-m", "benchmarks.gpu.device", *(["--cpu"] if options.cpu else [])], 120, show=lambda _: None
    )
    if device.problem:
        print(f"make gpu needs a GPU and a torch that can use it; `make gpu CPU=1` rehearses without: {device.text}")
        return NO_GPU
    machine = json.loads(device.text.splitlines()[-1])
    print(f"{'a rehearsal on ' if options.cpu else ''}{json.dumps(machine)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="elasticjob-gpu-", ignore_cleanup_errors=True) as scratch:
        results = options.results or (Path(scratch) / "results" if options.cpu else ROOT / "benchmarks" / "results")
        failed = _run_all(options, machine, Path(scratch), results)
        if target := options.page or (None if options.cpu else ROOT / "docs/contribute/benchmarks.md"):
            text = target.read_text() if target.exists() else ""
            target.write_text(page.replace(text, page.part(page.load(results))))
            print(f"the table is in {target}, the raw figures are in {results}")
    print(f"FAILED: {', '.join(failed)}" if failed else "all steps succeeded")
    return 1 if failed else 0


def _run_all(options: argparse.Namespace, machine: dict[str, object], scratch: Path, results: Path) -> list[str]:
    """Run the steps, those that measure no time together and first; return the names of those that failed."""
    end = time.monotonic() + 60 * (options.minutes or (MINUTES_ON_CPU if options.cpu else MINUTES))
    chosen = [step for step in STEPS if step.name in options.rows]
    first = [step for step in chosen if step.together]
    with ThreadPoolExecutor(1 if options.cpu else len(STEPS) + 1) as pool:
        running = [pool.submit(_tests, options, end)] if TESTS in options.rows else []
        running += [pool.submit(_measure, step, options, machine, scratch, results, end) for step in first]
        try:
            problems = [future.result() for future in running]
        except BaseException:  # an interruption
            processes.stop()
            raise
    for step in chosen:
        if not step.together:
            problems.append(_measure(step, options, machine, scratch, results, end))
    return [problem for problem in problems if problem]


def _tests(options: argparse.Namespace, end: float) -> str:
    command = _command(TESTS, options)
    limit = min(_limit(TESTS_LIMIT, options), end - time.monotonic())
    ended = processes.run(command, limit, show=_prefixed(TESTS))
    return _said(TESTS, ended.problem, ended.seconds)


def _measure(
    step: Step, options: argparse.Namespace, machine: dict[str, object], scratch: Path, results: Path, end: float
) -> str:
    """Run one step and save its rows; return its name with what is wrong, or nothing."""
    left = end - time.monotonic()
    if left < LEAST:
        return _said(step.name, "" if step.optional else "no time was left", 0.0, begun=False)
    output, limit = scratch / f"{step.name}.json", min(_limit(step.limit, options), left)
    print(f"[{step.name}] begins, at most {limit:.0f} s", flush=True)
    command = [*_command(step.name, options), "--output", str(output)]
    for row in step.rows:  # no figure of an earlier run may stand for one that is missing
        (results / f"{row}.json").unlink(missing_ok=True)
    ended = processes.run(command, limit, show=_prefixed(step.name))
    if ended.problem:
        found = {row: [Sample(None, ended.problem)] for row in step.rows}
    else:
        read = json.loads(output.read_text())
        found = {row: [Sample(**sample) for sample in samples] for row, samples in read.items()}
    for row, samples in found.items():
        print(f"[{step.name}] {ROWS[row].title}: {format_value(middle(samples), ROWS[row].unit)}", flush=True)
        save(ROWS[row], {OURS: samples}, machine, ended.seconds, f"make gpu ROWS={step.name}", results)
    return _said(step.name, ended.problem or _wrong_weights(step, found), ended.seconds)


def _wrong_weights(step: Step, found: Samples) -> str:
    """Return what is wrong if a recovery had wrong weights: a goal that another row misses is no failure."""
    wrong = [sample for samples in found.values() for sample in samples if sample.value]
    return f"wrong weights: {wrong[0].note}" if step.name.startswith("weights-") and wrong else ""


def _limit(seconds: float, options: argparse.Namespace) -> float:
    return seconds * (SLOWER if options.cpu else 1.0)


def _said(name: str, problem: str, seconds: float, *, begun: bool = True) -> str:
    text = problem or ("ended" if begun else "left out: no time was left")
    print(f"[{name}] {text} ({seconds:.0f} s)", flush=True)
    return f"{name} ({problem})" if problem else ""


def _prefixed(name: str) -> processes.Show:
    return lambda line: print(f"[{name}] {line}", flush=True)


def _command(name: str, options: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--step", name, *(["--cpu"] if options.cpu else [])]


def _run_step(name: str, options: argparse.Namespace) -> int:
    """In a process of its own: run one step, and write the samples of its rows."""
    scale: Scale = ON_CPU if options.cpu else ON_GPU
    with tempfile.TemporaryDirectory(prefix=f"elasticjob-gpu-{name}-", ignore_cleanup_errors=True) as folder:
        if name == TESTS:
            return min(1, gpu_tests.main(Path(folder), 1 if options.cpu else TOGETHER, options.cpu))
        step = next(step for step in STEPS if step.name == name)
        found = step.measure(Path(folder), scale)
    samples = {row: [vars(sample) for sample in each] for row, each in found.items()}
    options.output.write_text(json.dumps(samples))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="rehearse over gloo, with small models")
    parser.add_argument(
        "--rows", type=_names, default=NAMES, metavar="NAME,...", help=f"only these: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--minutes", type=float, help=f"all steps end by then (default: {MINUTES:g}, with --cpu {MINUTES_ON_CPU:g})"
    )
    parser.add_argument("--results", type=_path, help="folder for raw figures (default: benchmarks/results)")
    parser.add_argument(
        "--page", type=_path, help="file whose GPU part is written (default: docs/contribute/benchmarks.md)"
    )
    parser.add_argument("--step", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _path(text: str) -> Path:
    return Path(text).resolve()


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown rows: {', '.join(unknown)}; known rows: {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

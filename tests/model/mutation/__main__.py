"""Run the explorer against each mutant: `make mutants`.

Each mutant is written into a temporary copy of the tree, never into the tree itself. The explorer runs there as it does
by default, up to the first failure. `--write` brings tests/MUTANTS.md up to date: the rows of the mutants that ran.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from model.mutation.mutants import MUTANTS, REPOSITORY, Mutant
from support.rendezvous.rounds_invariants import INVARIANTS

COPIED = ("agent", "operator", "tests/model", "tests/support", "pyproject.toml")
PAGE = REPOSITORY / "tests/MUTANTS.md"
WALKS = "tests/model/test_rounds_explored.py"
EXPLORER = (
    f"{WALKS}::test_charges_and_budgets_are_exact",
    f"{WALKS}::test_invariants_hold_and_the_job_ends_once_faults_stop",
    f"{WALKS}::test_a_replaced_store_that_is_still_alive_runs_no_second_world",
    "tests/model/test_rounds_interleaved.py",
    "tests/model/test_rounds_options.py",
    "tests/model/test_rounds_batched.py",
    "tests/model/test_rounds_partition.py",
    "tests/model/test_standby_store.py",
    "tests/model/test_node_ends.py",
    "tests/model/operator/test_operator_explored.py",
    "-k", "not is_found",
)  # fmt: skip
"""The default run, with the part first that finds most, without the tests of the explorer itself."""
_NAME = re.compile(r"(?:^|[\s'\"(:,])((?:[a-z]+_){2,}[a-z]+)(?=['\",:)]|$)")
_FAILED = re.compile(r"^FAILED \S+?::(\w+)", re.MULTILINE)
_ERROR = re.compile(r"^E\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """How one run of the explorer ended."""

    mutant: Mutant | None
    caught_by: str
    """The invariant that broke, or what else failed; empty if nothing did."""
    seconds: float

    def __str__(self) -> str:
        name = self.mutant.name if self.mutant else "no mutant"
        return f"{name}: {self.caught_by or 'NOT CAUGHT'} ({self.seconds:.0f} s)"


def copy_tree(root: Path) -> Path:
    """Copy what the explorer needs into `root`, and return it."""
    for name in COPIED:
        source, target = REPOSITORY / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return root


def run(mutant: Mutant | None, root: Path, limit: float, tests: Sequence[str] = EXPLORER) -> Result:
    """Run the explorer in the copy `root` with this mutant, and restore the copy."""
    if mutant is not None:
        mutant.apply(root)
    started = time.monotonic()
    try:
        caught_by = _explore(root, limit, tests)
    finally:
        if mutant is not None:
            shutil.copy(REPOSITORY / mutant.path, root / mutant.path)
    return Result(mutant, caught_by, time.monotonic() - started)


def _explore(root: Path, limit: float, tests: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=0", *tests]
    # Without bytecode: a file that was replaced twice in a second would be taken for unchanged.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return "" if done.returncode == 0 else name_of_failure(done.stdout)


def name_of_failure(output: str) -> str:
    """Return the names of the invariants in pytest's output, else the first error, else the test that failed."""
    errors = _ERROR.findall(output)
    known = {i.__name__ for i in INVARIANTS}
    named = [name for error in errors for name in _NAME.findall(error) if name in known]
    if named:
        return f"`{named[0]}`"
    if any("moves without a fault" in error for error in errors):
        return "`liveness_violation`"
    failed = _FAILED.search(output)
    problem = errors[0] if errors else output.strip().splitlines()[-1]
    return f"{problem[:80]} (`{failed.group(1)}`)" if failed else problem[:80]


def run_all(mutants: Sequence[Mutant | None], jobs: int, limit: float, tests: Sequence[str]) -> list[Result]:
    """Run the explorer against all mutants, `jobs` at a time; print each result."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as parent, ThreadPoolExecutor(jobs) as pool:
        roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            roots.put(copy_tree(Path(parent) / str(number)))

        def work(mutant: Mutant | None) -> Result:
            root = roots.get()
            try:
                return run(mutant, root, limit, tests)
            finally:
                roots.put(root)

        for done in as_completed([pool.submit(work, mutant) for mutant in mutants]):
            results.append(done.result())
            print(f"[{len(results)}/{len(mutants)}] {results[-1]}", flush=True)
    return results


def rows(results: Sequence[Result], mark: str = "") -> dict[str, str]:
    """Return the rows of a table in Markdown, by mutant; `mark` follows the seconds."""
    return {
        r.mutant.name: f"| {r.mutant.name} | `{r.mutant.path.rsplit('/', 1)[-1]}` | {r.caught_by or '**not caught**'} |"
        f" {r.seconds:.0f}{mark} |"
        for r in results
        if r.mutant is not None
    }


def table(of: Mapping[str, str]) -> str:
    """Return the rows as a table, in the order of MUTANTS."""
    found = (of[m.name] for m in MUTANTS if m.name in of)
    return "\n".join(("| mutant | in | caught by | seconds |", "|---|---|---|---|", *found))


def written_rows() -> dict[str, str]:
    """Return the rows of tests/MUTANTS.md by mutant; the head of the table is among them."""
    lines = PAGE.read_text().splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def page(of: Mapping[str, str]) -> str:
    """Return tests/MUTANTS.md with these rows."""
    known = [of[m.name] for m in MUTANTS if m.name in of]
    missed = sum("**not caught" in row for row in known)
    return f"""# Mutants

Each row is a mistake in the product's decisions, written into a copy of the source. The
[explorer](../docs/contribute/explorer.md) runs against each of them, up to the first failure.
`make mutants` runs them all and writes this page; `tests/unit/test_mutants.py` checks that each still fits the source.

This page is of several runs on a busy machine: {len(known) - missed} of {len(known)} mutants are caught, {missed} are \
not ([why](../docs/contribute/explorer.md)).
A star marks a run of the tests only that were written for such mutants.

{table(of)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 1: a mutant was not caught, or the explorer fails without one."""
    parser = argparse.ArgumentParser(prog="python -m model.mutation", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to run at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each mutant")
    parser.add_argument("--only", nargs="*", default=[""], help="run the mutants whose name contains one of these")
    parser.add_argument("--tests", nargs="*", default=EXPLORER, help="run these tests only: the page marks them")
    parser.add_argument("--write", action="store_true", help="bring tests/MUTANTS.md up to date")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if any(part in m.name for part in args.only)]
    results = run_all([None, *chosen], args.jobs, args.limit, args.tests)
    caught = sum(bool(r.caught_by) for r in results if r.mutant is not None)
    found = rows(results, "" if args.tests is EXPLORER else " *")
    print(f"\n{table(found)}\n\n{caught} of {len(chosen)} mutants are caught")
    if args.write:
        PAGE.write_text(page(written_rows() | found))
    broken = next(r for r in results if r.mutant is None)
    if broken.caught_by:
        print(f"the explorer fails without a mutant: {broken.caught_by}")
    return int(bool(broken.caught_by) or caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())

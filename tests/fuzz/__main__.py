"""`make fuzz MINUTES=9`: read changed inputs for so long, and write the table of docs/operate/security.md."""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.targets import TARGETS, Target, opened

PAGE = Path(__file__).parents[2] / "docs/operate/security.md"
BEGIN, END = "<!-- make fuzz: begin -->", "<!-- make fuzz: end -->"
HANG = 20.0
"""Seconds after which one input ends the command, with a stack."""
SHOWN = 3
"""Crashes of one target whose traceback is shown."""


@dataclass
class Result:
    """What one target did."""

    inputs: int = 0
    refused: int = 0
    growth: int = 0
    """KiB by which the highest memory of this process has grown."""
    crashes: list[str] = field(default_factory=list)
    """Tracebacks."""


def fuzz(target: Target, seed: int, *, seconds: float = float("inf"), inputs: int = sys.maxsize) -> Result:
    """Let the target read changed inputs until the time is over or so many are read."""
    result, before = Result(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + seconds
    with opened(target) as read:
        while result.inputs < inputs and time.monotonic() < end:
            rng = random.Random(f"{seed} {result.inputs}")
            result.inputs += 1
            faulthandler.dump_traceback_later(HANG, exit=True)
            try:
                read(rng)
            except target.refusals:
                result.refused += 1
            except Exception:
                result.crashes.append(f"{target.name}, seed {seed}, input {result.inputs}\n{traceback.format_exc()}")
            finally:
                faulthandler.cancel_dump_traceback_later()
    result.growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return result


def table(results: dict[str, Result], command: str) -> str:
    """Return the part of the page."""
    rows = [
        f"| {name} | {r.inputs:,} | {r.refused:,} | {len(r.crashes)} | {r.growth / 1024:.1f} MiB |"
        for name, r in results.items()
    ]
    head = ["| read | inputs | refused | crashes | more memory at most |", "|---|---|---|---|---|"]
    return "\n".join([f"Last run, by `{command}`:", "", *head, *rows])


def write(text: str) -> None:
    """Replace the part of the page between the marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, Result] = {}
    for target in TARGETS:
        found = fuzz(target, options.seed, seconds=60 * options.minutes / len(TARGETS))
        results[target.name] = found
        print(
            f"{target.name}: {found.inputs} inputs, {found.refused} refused, {len(found.crashes)} crashes", flush=True
        )
        print("\n".join(found.crashes[:SHOWN]), end="")
    write(table(results, f"make fuzz MINUTES={options.minutes:g} SEED={options.seed}"))
    return 1 if any(result.crashes for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

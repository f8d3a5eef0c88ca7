"""Run the rows, save the raw figures and write docs/contribute/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks import machine, report
from benchmarks.registry import ROWS
from benchmarks.run import exit_on_sigterm, measure, save


def main() -> int:
    options = _options()
    exit_on_sigterm()
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    if options.list:
        for row in ROWS:
            print(f"{row.name:22} about {row.seconds:4.0f} s   {row.title}")
        return 0
    description = machine.describe()
    print(f"{len(rows)} rows, about {sum(r.seconds for r in rows) / 60:.0f} minutes; {description}", flush=True)
    begin = time.monotonic()
    for row in rows:
        row_begin = time.monotonic()
        samples = measure(row, options.repeat)
        save(row, samples, description, time.monotonic() - row_begin, f"make bench ROWS={row.name}")
    report.write()
    print(
        f"{time.monotonic() - begin:.0f} s; the table is in docs/contribute/benchmarks.md, "
        "the raw figures in benchmarks/results"
    )
    return 0


def _options() -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--rows", type=_names, default=[], metavar="NAME,...", help=f"only these rows: {', '.join(names)}"
    )
    parser.add_argument("--repeat", type=int, help="number of samples of each side (default: the row's own)")
    parser.add_argument("--list", action="store_true", help="list the rows and their durations")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    known = {row.name for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown rows: {', '.join(unknown)}; known rows: {', '.join(sorted(known))}")
    return names


if __name__ == "__main__":
    sys.exit(main())

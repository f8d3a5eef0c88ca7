"""Run the rows, keep the raw figures, write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, report
from benchmarks.registry import ROWS
from benchmarks.row import Row, Sample, middle, parts

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    options = _options()
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    if options.list:
        for row in ROWS:
            print(f"{row.name:22} about {row.seconds:4.0f} s   {row.title}")
        return 0
    what = machine.describe()
    print(f"{len(rows)} rows, about {sum(r.seconds for r in rows) / 60:.0f} minutes; {what}", flush=True)
    begin = time.monotonic()
    for row in rows:
        took = time.monotonic()
        samples = measure(row, options.repeat)
        keep(row, samples, what, time.monotonic() - took)
    report.write()
    print(f"{time.monotonic() - begin:.0f} s; the table is in docs/benchmarks.md, raw figures in benchmarks/results")
    return 0


def measure(row: Row, repeat: int | None) -> dict[str, list[Sample]]:
    """The sides take turns, so that a slow spell of the machine meets all of them."""
    print(f"\n{row.name}: {row.title}", flush=True)
    samples: dict[str, list[Sample]] = {side: [] for side in row.sides}
    wanted = {side: repeat or row.times(side) for side in row.sides}
    for turn in range(max(wanted.values())):
        for side, once in row.sides.items():
            if turn < wanted[side]:
                samples[side].append(one(once, row, side))
    for side, found in samples.items():
        print(f"  {side:28} median {tell(middle(found), row.unit)}", flush=True)
    return samples


def one(once: object, row: Row, side: str) -> Sample:
    assert callable(once)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-", ignore_cleanup_errors=True) as folder:
        try:
            sample: Sample = once(Path(folder))
        except Exception as error:
            sample = Sample(None, f"{type(error).__name__}: {error}"[:300])
    split = ", ".join(f"{name} {value:.3g}" for name, value in sample.parts.items())
    said = f"{tell(sample.value, row.unit)} {sample.note}"
    print(f"  {side:28} {said:20} [{split}] ({time.monotonic() - began:.0f} s)", flush=True)
    return sample


def tell(value: float | None, unit: str) -> str:
    return "never" if value is None else f"{value:.3g} {unit}"


def keep(row: Row, samples: dict[str, list[Sample]], what: dict[str, object], took: float) -> None:
    """One file a row: raw samples, and what the table shows of them."""
    RESULTS.mkdir(exist_ok=True)
    data = {
        "row": row.name,
        "title": row.title,
        "unit": row.unit,
        "want": row.want,
        "more_is_better": row.more_is_better,
        "note": row.note,
        "command": f"make bench ROWS={row.name}",
        "machine": what,
        "seconds": round(took),
        "sides": {
            side: {"median": middle(found), "parts": parts(found), "samples": [asdict(s) for s in found]}
            for side, found in samples.items()
        },
    }
    (RESULTS / f"{row.name}.json").write_text(json.dumps(data, indent=1) + "\n")


def _options() -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", type=_names, default=[], metavar="NAME,...", help=f"only these: {', '.join(names)}")
    parser.add_argument("--repeat", type=int, help="samples of each side, instead of each row's own number")
    parser.add_argument("--list", action="store_true", help="rows, and how long each takes")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    known = {row.name for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return names


if __name__ == "__main__":
    sys.exit(main())

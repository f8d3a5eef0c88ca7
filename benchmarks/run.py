"""Takes the samples of a row, tells of them on screen and keeps them."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.row import Row, Sample, middle, parts

RESULTS = Path(__file__).with_name("results")


def end_in_order() -> None:
    """SIGTERM as Ctrl-C: what was started is ended on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


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


def keep(row: Row, samples: dict[str, list[Sample]], what: dict[str, object], took: float, command: str) -> None:
    """One file a row: raw samples, and what the table shows of them."""
    RESULTS.mkdir(exist_ok=True)
    data = {
        "row": row.name,
        "title": row.title,
        "unit": row.unit,
        "want": row.want,
        "more_is_better": row.more_is_better,
        "note": row.note,
        "command": command,
        "machine": what,
        "seconds": round(took),
        "sides": {
            side: {"median": middle(found), "parts": parts(found), "samples": [asdict(s) for s in found]}
            for side, found in samples.items()
        },
    }
    (RESULTS / f"{row.name}.json").write_text(json.dumps(data, indent=1) + "\n")

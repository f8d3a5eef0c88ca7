"""Take the samples of a row, print them and save them."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.row import Measure, Row, Sample, middle, parts

RESULTS = Path(__file__).with_name("results")


def exit_on_sigterm() -> None:
    """Exit on SIGTERM as on Ctrl-C, so that context managers end the processes that were started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def measure(row: Row, repeat: int | None) -> dict[str, list[Sample]]:
    """Take the samples of all sides in turns, so that a slow phase of the machine affects all of them."""
    print(f"\n{row.name}: {row.title}" + (f"\n  ({row.left_out})" if row.left_out else ""), flush=True)
    samples: dict[str, list[Sample]] = {side: [] for side in row.sides}
    wanted = {side: repeat or row.times(side) for side in row.sides}
    for turn in range(max(wanted.values())):
        for side, take in row.sides.items():
            if turn < wanted[side]:
                samples[side].append(take_sample(take, row, side))
    for side, found in samples.items():
        print(f"  {side:28} median {format_value(middle(found), row.unit)}", flush=True)
    return samples


def take_sample(take: Measure, row: Row, side: str) -> Sample:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-", ignore_cleanup_errors=True) as folder:
        try:
            sample = take(Path(folder))
        except Exception as error:
            sample = Sample(None, f"{type(error).__name__}: {error}"[:300])
    split = ", ".join(f"{name} {value:.3g}" for name, value in sample.parts.items())
    result = f"{format_value(sample.value, row.unit)} {sample.note}"
    print(f"  {side:28} {result:20} [{split}] ({time.monotonic() - began:.0f} s)", flush=True)
    return sample


def format_value(value: float | None, unit: str) -> str:
    return "never" if value is None else f"{value:.3g} {unit}"


def save_cluster_row(
    name: str,
    title: str,
    target: float | None,
    samples: dict[str, list[Sample]],
    machine: dict[str, object],
    took: float,
    command: str,
) -> None:
    """Save a row of seconds that a job on the real cluster gave: its samples were not taken by `measure`."""
    save(Row(f"cluster-{name}", title, "s", target, {}, {}, 0), samples, machine, took, command)


def save(
    row: Row,
    samples: dict[str, list[Sample]],
    machine: dict[str, object],
    took: float,
    command: str,
    folder: Path = RESULTS,
) -> None:
    """Write the file of a row: its samples and the medians in the table. `took`: seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "row": row.name,
        "title": row.title,
        "unit": row.unit,
        "want": row.want,
        "more_is_better": row.more_is_better,
        "note": row.note,
        "command": command,
        "machine": machine,
        "seconds": round(took),
        "sides": {
            side: {"median": middle(found), "parts": parts(found), "samples": [asdict(s) for s in found]}
            for side, found in samples.items()
        },
    }
    (folder / f"{row.name}.json").write_text(json.dumps(data, indent=1) + "\n")

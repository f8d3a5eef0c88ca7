"""The speed of `State.sync` with 1 GB of tensors, beside a plain TCP connection between the same processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.ours import output_of
from benchmarks.row import OURS, Row, Sample

_SCRIPT = str(Path(__file__).with_name("large_transfer.py"))
_END = "all transfers measured"
_PAIR = re.compile(r"pair sync=([\d.]+) plain=([\d.]+)")


def transfer(folder: Path) -> Sample:
    """Run the script on three nodes of this machine: one sends, one receives, and one has the state already."""
    lines = output_of(folder, _SCRIPT, _END, nodes=3)
    return Sample(None, "the script did not end") if lines is None else share(lines)


def share(lines: Iterable[str]) -> Sample:
    """Return the median share of the plain connection's speed, from the lines of the script.

    The first pair is left out: it forms the connections.
    """
    pairs = [(float(m[1]), float(m[2])) for text in lines if (m := _PAIR.search(text))][1:]
    parts = {"sync, s": median(sync for sync, _ in pairs), "plain, s": median(plain for _, plain in pairs)}
    return Sample(median(100 * plain / sync for sync, plain in pairs), parts=parts)


ROWS = [
    Row(
        "transfer-1gb",
        "State of 1 GB to a node that joins: share of the speed of a plain TCP connection",
        "%",
        80,
        {OURS: transfer},
        {OURS: 3},
        60,
        more_is_better=True,
        note="Over loopback, both ends of a connection share the two cores.",
    ),
]

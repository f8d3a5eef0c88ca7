"""What happened, what the status said, and how long until the next training step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from support.logbook import Step

TOLD = ("Restarting", "Running", "FullyScaled", "RendezvousReady", "Complete", "Failed")
"""Conditions whose changes a reader of the timeline wants to see."""


@dataclass(frozen=True)
class Deed:
    """Something done to the job. `world`: the size it should train at afterwards, 0 for any."""

    time: float
    what: str
    world: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A job's status as it was seen."""

    time: float
    status: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One deed and what followed; seconds are None where no step followed."""

    deed: Deed
    next_step: float | None
    """From the deed to the first step after training had stood still."""
    standstill: float | None
    """Between the last step before and the first after."""
    full_size: float | None
    """From the deed to the first step of a world of the wanted size."""
    said: tuple[str, ...]


def rows(deeds: Sequence[Deed], steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> list[Row]:
    """A row for each deed; what follows a deed lasts until the next."""
    ends = [d.time for d in deeds[1:]] + [float("inf")]
    return [_row(deed, end, steps, snapshots) for deed, end in zip(deeds, ends, strict=True)]


def _row(deed: Deed, end: float, steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> Row:
    before = [s for s in steps if s.time <= deed.time][-1:]
    during = [s for s in steps if deed.time < s.time < end]
    gaps = [(b.time - a.time, b.time - deed.time) for a, b in pairwise([*before, *during])]
    standstill, next_step = max(gaps, default=(None, None))
    full = next((s.time - deed.time for s in during if s.world == deed.world), None)
    return Row(deed, next_step, standstill, full, tuple(_said(deed.time, end, snapshots)))


def _said(start: float, end: float, snapshots: Sequence[Snapshot]) -> list[str]:
    """Changes of the conditions that matter, in the status' own words."""
    earlier = [s for s in snapshots if s.time <= start]
    known = _reasons(earlier[-1].status) if earlier else {}
    said = []
    for snapshot in snapshots:
        if not start < snapshot.time < end:
            continue
        now = _reasons(snapshot.status)
        said += [
            f"{kind}={status} {reason}" for kind, (status, reason) in now.items() if known.get(kind) != (status, reason)
        ]
        known = now
    return said


def _reasons(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", []) if c["type"] in TOLD}

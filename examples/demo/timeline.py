"""What happened, what the status said, and how long until the next training step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from support.logbook import Step

TOLD = ("RendezvousReady", "Restarting", "FullyScaled", "Complete", "Failed")
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
    """One deed and what followed, in seconds; None where no world formed, or no step followed."""

    deed: Deed
    next_step: float | None
    """From the deed to the first step of the next world."""
    standstill: float | None
    """Between the last step of the old world and the first of the next."""
    full_size: float | None
    """From the deed to the first step of a world of the wanted size."""
    said: tuple[str, ...]


@dataclass(frozen=True)
class _World:
    """`formed`: when its workers ran, Unix seconds."""

    formed: float
    size: int


def rows(deeds: Sequence[Deed], steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> list[Row]:
    """A row for each deed; what follows a deed lasts until the next."""
    ends = [d.time for d in deeds[1:]] + [float("inf")]
    return [_row(deed, end, steps, snapshots) for deed, end in zip(deeds, ends, strict=True)]


def _row(deed: Deed, end: float, steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> Row:
    worlds = [w for w in _worlds(snapshots) if deed.time < w.formed < end]
    first = next((s.time for w in worlds for s in steps if s.time > w.formed), None)
    full = next((s.time for w in worlds if w.size == deed.world for s in steps if s.time > w.formed), None)
    before = [s.time for s in steps if first is not None and s.time < worlds[0].formed][-1:]
    return Row(
        deed,
        None if first is None else first - deed.time,
        None if first is None or not before else first - before[0],
        None if full is None else full - deed.time,
        tuple(_said(deed.time, end, snapshots)),
    )


def _worlds(snapshots: Sequence[Snapshot]) -> list[_World]:
    """Every world that status has told of."""
    sizes: dict[str, int] = {}
    for snapshot in snapshots:
        # The size is 0 again once the round ends, while the time stays.
        if formed := snapshot.status.get("lastRendezvousTime"):
            sizes[formed] = max(sizes.get(formed, 0), snapshot.status.get("worldSize", 0))
    return [_World(datetime.fromisoformat(formed).timestamp(), size) for formed, size in sizes.items()]


def _said(start: float, end: float, snapshots: Sequence[Snapshot]) -> list[str]:
    """What the conditions that matter went through, and the failure that was named."""
    earlier = [s for s in snapshots if s.time <= start]
    known = earlier[-1].status if earlier else {}
    reasons: dict[str, list[str]] = {}
    failure = known.get("lastFailure")
    for snapshot in (s for s in snapshots if start < s.time < end):
        before, now = _reasons(known), _reasons(snapshot.status)
        for kind in TOLD:
            if kind in now and now[kind] != before.get(kind):
                reasons.setdefault(kind, []).append(now[kind])
        known = snapshot.status
    said = [f"{kind}: {' → '.join(passed)}" for kind, passed in reasons.items()]
    named = known.get("lastFailure")
    return said if named == failure or not named else [*said, f"lastFailure: {_tell(named)}"]


def _reasons(status: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["reason"] for c in status.get("conditions", [])}


def _tell(failure: dict[str, Any]) -> str:
    if failure.get("rank") is None:
        return f"{failure.get('pod')}, {failure.get('class')}"
    what = failure.get("exception") or failure.get("signal") or f"exit code {failure.get('exitCode')}"
    return f"rank {failure['rank']} in {failure.get('pod')}, {what}"

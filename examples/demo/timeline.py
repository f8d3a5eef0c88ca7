"""Compute the demo's timeline from actions, training steps and statuses: pauses, times, status changes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from support.cluster.logbook import Step

CONDITIONS = ("RendezvousReady", "Restarting", "FullyScaled", "Complete", "Failed")
"""Conditions whose changes the timeline shows."""


@dataclass(frozen=True)
class Action:
    """A fault, or another action on the job. `time`: Unix seconds. `world`: the expected world size; 0: any."""

    time: float
    what: str
    world: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The status of the job at a time (Unix seconds)."""

    time: float
    status: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The figures of one action in seconds. None if no world formed or no step followed before the next action."""

    action: Action
    next_step: float | None
    """From the action to the first step of the next world."""
    pause: float | None
    """From the last step of the old world to the first step of the next one."""
    full_size: float | None
    """From the action to the first step of a world of the expected size."""
    status: tuple[str, ...]
    """Changes of conditions and of `lastFailure`."""


@dataclass(frozen=True)
class _World:
    """One world. `formed`: the time when its workers ran (Unix seconds)."""

    formed: float
    size: int


def rows(actions: Sequence[Action], steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> list[Row]:
    """Return a row for each action. Its figures end with the next action."""
    ends = [a.time for a in actions[1:]] + [float("inf")]
    return [_row(action, end, steps, snapshots) for action, end in zip(actions, ends, strict=True)]


def _row(action: Action, end: float, steps: Sequence[Step], snapshots: Sequence[Snapshot]) -> Row:
    worlds = [w for w in _worlds(snapshots) if action.time < w.formed < end]
    first = next((s.time for w in worlds for s in steps if s.time > w.formed), None)
    full = next((s.time for w in worlds if w.size == action.world for s in steps if s.time > w.formed), None)
    before = [s.time for s in steps if first is not None and s.time < worlds[0].formed][-1:]
    return Row(
        action,
        None if first is None else first - action.time,
        None if first is None or not before else first - before[0],
        None if full is None else full - action.time,
        tuple(_status_changes(action.time, end, snapshots)),
    )


def _worlds(snapshots: Sequence[Snapshot]) -> list[_World]:
    """Return all worlds in the statuses."""
    sizes: dict[str, int] = {}
    for snapshot in snapshots:
        # At the end of a round worldSize becomes 0, while lastRendezvousTime stays.
        if formed := snapshot.status.get("lastRendezvousTime"):
            sizes[formed] = max(sizes.get(formed, 0), snapshot.status.get("worldSize", 0))
    return [_World(datetime.fromisoformat(formed).timestamp(), size) for formed, size in sizes.items()]


def _status_changes(start: float, end: float, snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the reasons that each condition had between two times, and the new `lastFailure`."""
    earlier = [s for s in snapshots if s.time <= start]
    last = earlier[-1].status if earlier else {}
    old_failure = last.get("lastFailure")
    changes: dict[str, list[str]] = {}
    for snapshot in (s for s in snapshots if start < s.time < end):
        before, now = _reasons(last), _reasons(snapshot.status)
        for kind in CONDITIONS:
            if kind in now and now[kind] != before.get(kind):
                changes.setdefault(kind, []).append(now[kind])
        last = snapshot.status
    texts = [f"{kind}: {' → '.join(reasons)}" for kind, reasons in changes.items()]
    failure = last.get("lastFailure")
    return texts if failure == old_failure or not failure else [*texts, f"lastFailure: {_describe(failure)}"]


def _reasons(status: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["reason"] for c in status.get("conditions", [])}


def _describe(failure: dict[str, Any]) -> str:
    if failure.get("rank") is None:
        return f"{failure.get('pod')}, {failure.get('class')}"
    cause = failure.get("exception") or failure.get("signal") or f"exit code {failure.get('exitCode')}"
    return f"rank {failure['rank']} in {failure.get('pod')}, {cause}"

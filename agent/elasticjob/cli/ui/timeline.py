"""A job's time line: its rounds, what ended them, how they were recovered, and its pods. Pure.

The status has the last round and the last failures, and Events have earlier rounds for an hour. What a page has seen
while it was open is kept too. All times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from elasticjob.cli.cluster.resources import KubeObject
from elasticjob.cli.objects.jobs import has_finished, is_true, job_condition, job_status
from elasticjob.cli.views.output import without_empty
from elasticjob.cli.views.times import parse_time

MOST_ROUNDS = 200
PHASES = ("detect", "stop", "rendezvous", "start")
PLANNED = frozenset(
    {
        "ScalingUp",
        "ScalingDown",
        "Scaled",
        "PodReplaced",
        "NodeCordoned",
        "NodeTerminating",
        "EvictionRequested",
        "Suspended",
        "Resumed",
    }
)
"""Reasons of Events that explain the end of a round that no fault has ended."""
_FORMED = re.compile(r"round (\d+): training on (\d+) pods? with (\d+) workers?")
_SLACK = 1.5
"""Seconds by which the time of an Event or a failure may differ from a round's: theirs are whole seconds."""


@dataclass(frozen=True)
class FormedRound:
    """A round that trained. `start`: when it had formed."""

    number: int
    start: float
    pods: int
    workers: int


Rounds = dict[int, FormedRound]
"""Rounds by number."""


def formed_rounds(job: KubeObject, events: Sequence[Mapping[str, Any]], seen: Rounds) -> Rounds:
    """Return the newest rounds. `events`: `event_views` of the job; `seen`: rounds of earlier calls.

    The status tells when the last round formed; an Event tells when it was written.
    """
    found: Rounds = {}
    for event in events:
        formed = _FORMED.match(str(event.get("message", ""))) if event.get("reason") == "WorldFormed" else None
        if formed and (start := parse_time(event.get("time"))) is not None:
            number, pods, workers = map(int, formed.groups())
            found[number] = FormedRound(number, start, pods, workers)
    found |= seen
    status = job_status(job)
    number, last = int(status.get("rendezvousRound") or 0), parse_time(status.get("lastRendezvousTime"))
    if number and last is not None and is_true(job, "Running"):
        found[number] = FormedRound(number, last, int(status.get("active") or 0), int(status.get("worldSize") or 0))
    return {number: found[number] for number in sorted(found)[-MOST_ROUNDS:]}


def job_timeline(
    job: KubeObject, pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], rounds: Rounds, now: float
) -> dict[str, Any]:
    """Return the time line. `pods`: `pod_view`s; `events`: `event_views` of the job."""
    status = job_status(job)
    failures = [f for f in status.get("recentFailures") or [] if parse_time(f.get("time")) is not None]
    shown = list(_rounds(job, list(rounds.values()), failures, events, now))
    lanes = _lanes(pods, failures)
    recoveries = [_recovery(failure) for failure in failures if failure.get("recoverySeconds")]
    starts = [item["start"] for item in (*shown, *recoveries, *lanes) if "start" in item]
    ended = parse_time(status.get("completionTime"))
    created = parse_time(job["metadata"].get("creationTimestamp"))
    earliest = min([*starts, *(() if created is None else (created,))], default=now)
    return {
        "start": earliest,
        "end": max(now if ended is None else ended, earliest + 1.0),
        "rounds": shown,
        "faults": [_fault(failure) for failure in failures],
        "recoveries": recoveries,
        "changes": [
            without_empty({"time": parse_time(e.get("time")), "reason": e.get("reason"), "message": e.get("message")})
            for e in events
            if e.get("reason") in PLANNED and parse_time(e.get("time")) is not None
        ],
        "lanes": lanes,
    }


def _rounds(
    job: KubeObject, rounds: Sequence[FormedRound], failures: Sequence[KubeObject],
    events: Sequence[Mapping[str, Any]], now: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    left = [(parse_time(failure["time"]) or 0.0, failure) for failure in failures]
    for formed, following in zip_longest(rounds, rounds[1:]):
        until = following.start if following else _last_end(job)
        end, cause = until, ""
        limit = until if until is not None and following else (now if until is None else until) + _SLACK
        own = [(time, failure) for time, failure in left if formed.start - _SLACK <= time <= limit]
        left = [(time, failure) for time, failure in left if time > limit]  # each fault ends one round
        if own and until is not None and (following is not None or not is_true(job, "Complete")):
            time, fault = own[0]
            end, how, cause = min(until, max(time, formed.start)), "fault", _short(fault)
        elif until is None:
            how = "training"
        elif following is None and has_finished(job):
            how = "ended"
        else:
            how, cause = "planned", _planned_cause(events, formed.start, until)
        yield without_empty(
            {
                "number": formed.number, "start": formed.start, "end": end, "pods": formed.pods,
                "workers": formed.workers, "how": how, "cause": cause,
            }
        )  # fmt: skip


def _last_end(job: KubeObject) -> float | None:
    """Return when the last round ended; None: it trains."""
    if has_finished(job):
        return parse_time(job_status(job).get("completionTime"))
    running = job_condition(job, "Running")
    return None if running.get("status") != "False" else parse_time(running.get("lastTransitionTime"))


def _planned_cause(events: Sequence[Mapping[str, Any]], start: float, end: float) -> str:
    """Return the last change before the end of a round, in the words of its Event."""
    for event in reversed(events):
        time = parse_time(event.get("time"))
        if event.get("reason") in PLANNED - {"Scaled", "Resumed"} and time and start - _SLACK <= time <= end + _SLACK:
            return f"{event['reason']}: {event.get('message', '')}"
    return ""


def _short(failure: KubeObject) -> str:
    rank = f" rank {failure['rank']}" if "rank" in failure else ""
    return f"{failure.get('class', 'failure')} of {failure.get('pod', '-')}{rank}"


def _fault(failure: KubeObject) -> dict[str, Any]:
    return without_empty(
        {"time": parse_time(failure["time"]), "pod": failure.get("pod"), "node": failure.get("node"),
         "what": _short(failure)}
    )  # fmt: skip


def _recovery(failure: KubeObject) -> dict[str, Any]:
    """Return the phases from a failure until the workers of the next round had started, with their seconds."""
    seconds = failure["recoverySeconds"]
    phases = [{"name": name, "seconds": float(seconds[name])} for name in PHASES if name in seconds]
    start = parse_time(failure["time"]) or 0.0
    end = start + sum(float(seconds[name]) for name in PHASES if name in seconds)
    return {"start": start, "end": end, "phases": phases, "what": _short(failure)}


def _lanes(pods: Sequence[Mapping[str, Any]], failures: Sequence[KubeObject]) -> list[dict[str, Any]]:
    """Return a lane for each worker pod: those that are there, then those of which only a failure is known."""
    ended = {failure.get("pod"): parse_time(failure["time"]) for failure in failures}
    lanes = [
        without_empty(
            {
                "pod": p["name"],
                "node": p.get("node"),
                "start": parse_time(p.get("created")),
                "state": p["state"],
                "end": ended.get(p["name"]) if p["state"].startswith("Failed") else None,
            }
        )
        for p in pods
        if p.get("role") == "worker"
    ]
    known = {lane["pod"] for lane in lanes}
    for failure in failures:
        if failure.get("pod") and failure["pod"] not in known:
            known.add(failure["pod"])
            lanes.append(
                without_empty(
                    {"pod": failure["pod"], "node": failure.get("node"), "end": parse_time(failure["time"]),
                     "state": "gone"}
                )
            )  # fmt: skip
    return lanes

"""What an agent tells monitoring systems: torch's events at its end, and counts at any time. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob.agent.machine.state import AgentState
from elasticjob.contract.messages import Failure, Outcome

_PREFIX = "elasticjob_agent"


@dataclass(frozen=True)
class AgentCounts:
    """Counts since the agent began. Times in seconds of one clock."""

    since: float
    """When the phase began."""
    began: float
    rounds: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """By class."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, the current one apart: how long rendezvous (idle), start, run and stop took in all."""


def update_counts(tally: AgentCounts, before: AgentState, after: AgentState, now: float) -> AgentCounts:
    """After a decision."""
    if after.round != before.round:
        tally = replace(tally, rounds=tally.rounds + 1)
    if after.failure is not None and after.failure != before.failure:
        kind = after.failure.kind.value
        tally = replace(tally, failures={**tally.failures, kind: tally.failures.get(kind, 0) + 1})
    if after.phase is not before.phase:
        spent = {before.phase.value: tally.seconds.get(before.phase.value, 0.0) + now - tally.since}
        tally = replace(tally, since=now, seconds={**tally.seconds, **spent})
    return tally


def metrics(tally: AgentCounts, state: AgentState, now: float) -> str:
    """In Prometheus' text format."""
    start = state.assignment
    seconds = {**tally.seconds}
    seconds[state.phase.value] = seconds.get(state.phase.value, 0.0) + now - tally.since
    lines = [
        f"{_PREFIX}_rounds_total {tally.rounds}",
        *(f'{_PREFIX}_worker_failures_total{{class="{kind}"}} {n}' for kind, n in sorted(tally.failures.items())),
        *(f'{_PREFIX}_phase_seconds_total{{phase="{phase}"}} {s:.3f}' for phase, s in sorted(seconds.items())),
        f'{_PREFIX}_phase{{phase="{state.phase.value}"}} 1',
    ]
    if start is not None:
        left = max(0, start.max_restarts - start.restarts)
        lines += [
            f"{_PREFIX}_world_size {start.world_size}",
            f"{_PREFIX}_restarts_total {start.restarts}",
            f"{_PREFIX}_remaining_restarts {left}",
            f"{_PREFIX}_flakiness_percent {int(100 - 100 * (left + 1) / (start.max_restarts + 1))}",
        ]
    return "\n".join(lines) + "\n"


def health(tally: AgentCounts, state: AgentState, now: float) -> str:
    """One JSON object: an agent that answers is alive, whatever its workers do."""
    since = round(now - tally.since, 3)
    return json.dumps({"phase": state.phase.value, "round": str(state.round or ""), "seconds": since}) + "\n"


@dataclass(frozen=True)
class EventSubject:
    """Who an event is about, for all of an agent's events."""

    run_id: str
    role: str
    hostname: str
    entry_point: str


def final_events(names: EventSubject, state: AgentState, outcome: Outcome, seconds: float) -> Iterator[dict[str, Any]]:
    """`torchelastic.worker.status.<STATE>` of each worker of the last round, then of the agent."""
    start = state.assignment
    for local_rank in range(state.announcement.local_world_size if start else 0):
        rank = start.rank + local_rank if start else 0
        failure = state.failure if state.failure and state.failure.rank == rank else None
        yield _event(names, state, _worker_state(outcome, failure), "WORKER", seconds, local_rank, failure)
    yield _event(names, state, "SUCCEEDED" if outcome is Outcome.SUCCEEDED else "FAILED", "AGENT", seconds)


def _worker_state(outcome: Outcome, failure: Failure | None) -> str:
    if outcome is Outcome.SUCCEEDED:
        return "SUCCEEDED"
    return "FAILED" if failure else "TERMINATED"


def _event(
    names: EventSubject,
    state: AgentState,
    status: str,
    source: str,
    seconds: float,
    local_rank: int | None = None,
    failure: Failure | None = None,
) -> dict[str, Any]:
    start = state.assignment
    more: dict[str, Any] = {
        "group_world_size": start.group_world_size if start else None,
        "entry_point": names.entry_point,
    }
    if start is not None and local_rank is not None:
        ranks = {"local_rank": local_rank, "role_rank": start.role_rank + local_rank}
        more |= {name: [value] for name, value in {**ranks, "role_world_size": start.role_world_size}.items()}
    metadata = {
        "run_id": names.run_id,
        "global_rank": start.rank + local_rank if start is not None and local_rank is not None else None,
        "group_rank": start.group_rank if start else None,
        "worker_id": None,
        "role": names.role,
        "hostname": names.hostname,
        "state": status,
        "total_run_time": int(seconds),
        "rdzv_backend": "elasticjob",
        "raw_error": f"{failure.exception}: {failure.message}" if failure else None,
        "metadata": json.dumps(more),
        "agent_restarts": start.restarts if start else 0,
    }
    return {"name": f"torchelastic.worker.status.{status}", "source": source, "metadata": metadata}

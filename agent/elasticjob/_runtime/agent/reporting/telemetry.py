"""Metrics and health of an agent, and torch's events at its end. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob._runtime.agent.state_machine.state import AgentState
from elasticjob._runtime.contract.failures.failure_text import with_exception
from elasticjob._runtime.contract.messages import Failure, Outcome, StateReceived
from elasticjob._runtime.contract.names import Backend
from elasticjob._runtime.contract.text import describe_speed

_PREFIX = "elasticjob_agent"


@dataclass(frozen=True)
class AgentCounts:
    """Counts since the agent started. Times are seconds of the caller's clock."""

    phase_since: float
    """When the current phase began."""
    started: float
    """When the agent started."""
    rounds: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Number of failures by failure class."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each phase so far, without the current stay; `idle` is the rendezvous."""


def update_counts(counts: AgentCounts, before: AgentState, after: AgentState, now: float) -> AgentCounts:
    """Return the counts after a decision that led from state `before` to state `after`."""
    if after.round != before.round:
        counts = replace(counts, rounds=counts.rounds + 1)
    if after.failure is not None and after.failure != before.failure:
        kind = after.failure.kind.value
        counts = replace(counts, failures={**counts.failures, kind: counts.failures.get(kind, 0) + 1})
    if after.phase is not before.phase:
        counts = replace(counts, phase_since=now, seconds=_phase_seconds(counts, before, now))
    return counts


def _phase_seconds(counts: AgentCounts, state: AgentState, now: float) -> dict[str, float]:
    """Return the seconds spent in each phase, with the current stay in the phase of `state`."""
    phase = state.phase.value
    return {**counts.seconds, phase: counts.seconds.get(phase, 0.0) + now - counts.phase_since}


def metrics(counts: AgentCounts, state: AgentState, now: float) -> str:
    """Return the metrics in Prometheus' text format."""
    start = state.assignment
    seconds = _phase_seconds(counts, state, now)
    lines = [
        f"{_PREFIX}_rounds_total {counts.rounds}",
        *(f'{_PREFIX}_worker_failures_total{{class="{kind}"}} {n}' for kind, n in sorted(counts.failures.items())),
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


def health(counts: AgentCounts, state: AgentState, now: float) -> str:
    """Return phase, round and seconds in that phase as one JSON object. An agent that answers at all is alive."""
    since = round(now - counts.phase_since, 3)
    return json.dumps({"phase": state.phase.value, "round": str(state.round or ""), "seconds": since}) + "\n"


def describe_transfer(received: StateReceived) -> str:
    """Return a line for the log about a training state that a worker has received, with size, speed and interface."""
    speed = describe_speed(received.size, received.seconds)
    interface = f" over {received.interface}" if received.interface else ""
    return f"rank {received.rank} has received the training state from another rank: {speed}{interface}"


@dataclass(frozen=True)
class EventSubject:
    """The fields that all torch events of one agent share."""

    run_id: str
    role: str
    hostname: str
    entry_point: str


def final_events(
    subject: EventSubject, state: AgentState, outcome: Outcome, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield `torchelastic.worker.status.<STATE>` of each worker of the last round, then of the agent.

    `seconds` is how long the agent ran.
    """
    start = state.assignment
    for local_rank in range(state.announcement.local_world_size if start else 0):
        rank = start.rank + local_rank if start else 0
        failure = state.failure if state.failure and state.failure.rank == rank else None
        yield _event(subject, state, _worker_state(outcome, failure), "WORKER", seconds, local_rank, failure)
    yield _event(subject, state, "SUCCEEDED" if outcome is Outcome.SUCCEEDED else "FAILED", "AGENT", seconds)


def _worker_state(outcome: Outcome, failure: Failure | None) -> str:
    if outcome is Outcome.SUCCEEDED:
        return "SUCCEEDED"
    return "FAILED" if failure else "TERMINATED"


def _event(
    subject: EventSubject,
    state: AgentState,
    status: str,
    source: str,
    seconds: float,
    local_rank: int | None = None,
    failure: Failure | None = None,
) -> dict[str, Any]:
    start = state.assignment
    extra: dict[str, Any] = {
        "group_world_size": start.group_world_size if start else None,
        "entry_point": subject.entry_point,
    }
    if start is not None and local_rank is not None:
        ranks = {"local_rank": local_rank, "role_rank": start.role_rank + local_rank}
        extra |= {name: [value] for name, value in {**ranks, "role_world_size": start.role_world_size}.items()}
    metadata = {
        "run_id": subject.run_id,
        "global_rank": start.rank + local_rank if start is not None and local_rank is not None else None,
        "group_rank": start.group_rank if start else None,
        "worker_id": None,
        "role": subject.role,
        "hostname": subject.hostname,
        "state": status,
        "total_run_time": int(seconds),
        "rdzv_backend": Backend.ELASTICJOB.value,
        "raw_error": with_exception(failure.exception, failure.message) if failure else None,
        "metadata": json.dumps(extra),
        "agent_restarts": start.restarts if start else 0,
    }
    return {"name": f"torchelastic.worker.status.{status}", "source": source, "metadata": metadata}

"""Events, metrics and the health endpoint of an agent."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from elasticjob._runtime.agent.reporting import health_endpoint
from elasticjob._runtime.agent.reporting.telemetry import (
    AgentCounts,
    EventSubject,
    final_events,
    health,
    metrics,
    update_counts,
)
from elasticjob._runtime.agent.state_machine.state import AgentRound, AgentState, Running, Stopping
from elasticjob._runtime.contract.messages import Announce, Failure, FailureClass, Outcome, StartRound
from elasticjob._runtime.contract.names import RoundId
from support.common.ports import free_port

ME = Announce(0, 0, "agent_id", "pod", "10.0.0.1", 1, 2, "trainer")
START = StartRound(RoundId(1, 0, 3), 1, 3, 2, 6, 2, 6, "10.0.0.1", 4567, 2, 5)
IDLE = AgentState(announcement=ME, stop_grace=1)
RUNNING = replace(IDLE, activity=Running(), last_round=AgentRound(START, frozenset({0, 1})))
FAILURE = Failure(FailureClass.USER_ERROR, "pod", 1.0, rank=3, exit_code=1, exception="ValueError", message="bad")
FAILED = replace(RUNNING, activity=Stopping(), last_round=AgentRound(START, frozenset({0}), failure=FAILURE))


def test_metrics_of_rounds_failures_restarts_flakiness_and_the_duration_of_each_step() -> None:
    counts = update_counts(AgentCounts(100.0, 100.0), IDLE, RUNNING, 101.5)
    counts = update_counts(counts, RUNNING, FAILED, 110.0)
    assert metrics(counts, FAILED, 112.0).splitlines() == [
        "elasticjob_agent_rounds_total 1",
        'elasticjob_agent_worker_failures_total{class="UserError"} 1',
        'elasticjob_agent_phase_seconds_total{phase="idle"} 1.500',
        'elasticjob_agent_phase_seconds_total{phase="running"} 8.500',
        'elasticjob_agent_phase_seconds_total{phase="stopping"} 2.000',
        'elasticjob_agent_phase{phase="stopping"} 1',
        "elasticjob_agent_world_size 6",
        "elasticjob_agent_restarts_total 2",
        "elasticjob_agent_remaining_restarts 3",
        "elasticjob_agent_flakiness_percent 33",
    ]


@pytest.mark.parametrize(
    ("state", "outcome", "expected"),
    [
        (RUNNING, Outcome.SUCCEEDED, ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]),
        (FAILED, Outcome.FAILED, ["TERMINATED", "FAILED", "FAILED"]),
        (RUNNING, Outcome.LEFT, ["TERMINATED", "TERMINATED", "FAILED"]),
        (IDLE, Outcome.ERROR, ["FAILED"]),
    ],
)
def test_events_of_workers_and_agent(state: AgentState, outcome: Outcome, expected: list[str]) -> None:
    events = list(final_events(EventSubject("uid", "trainer", "host", "python"), state, outcome, 12.7))
    assert [event["name"] for event in events] == [f"torchelastic.worker.status.{name}" for name in expected]
    assert [event["source"] for event in events] == [*["WORKER"] * (len(expected) - 1), "AGENT"]


def test_an_event_has_torchs_metadata() -> None:
    event = list(final_events(EventSubject("uid", "trainer", "host", "python"), FAILED, Outcome.FAILED, 12.7))[1]
    extra = json.loads(event["metadata"].pop("metadata"))
    assert event["metadata"] == {
        "run_id": "uid",
        "global_rank": 3,
        "group_rank": 1,
        "worker_id": None,
        "role": "trainer",
        "hostname": "host",
        "state": "FAILED",
        "total_run_time": 12,
        "rdzv_backend": "elasticjob",
        "raw_error": "ValueError: bad",
        "agent_restarts": 2,
    }
    assert extra == {
        "group_world_size": 3,
        "entry_point": "python",
        "local_rank": [1],
        "role_rank": [3],
        "role_world_size": [6],
    }


async def test_the_health_endpoint() -> None:
    port = free_port()
    counts = AgentCounts(1.0, 1.0)
    server = await health_endpoint.serve_health(
        {health_endpoint.HEALTH_PORT_VARIABLE: str(port)},
        lambda: health(counts, RUNNING, 3.0),
        lambda: metrics(counts, RUNNING, 3.0),
    )
    assert server is not None
    try:
        assert '{"phase": "running", "round": "1.0.3", "seconds": 2.0}' in await _get(port, "/")
        assert "elasticjob_agent_world_size 6" in await _get(port, "/metrics")
    finally:
        server.close()


@pytest.mark.parametrize("port", ["", "x", "99999999"])
async def test_no_health_endpoint_without_a_valid_port(port: str) -> None:
    assert await health_endpoint.serve_health({health_endpoint.HEALTH_PORT_VARIABLE: port}, str, str) is None


async def test_an_agent_trains_without_its_endpoint_if_another_on_its_machine_has_the_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With hostNetwork, pods share the ports of their machine."""
    with socket.create_server(("", 0)) as other:
        env = {health_endpoint.HEALTH_PORT_VARIABLE: str(other.getsockname()[1])}
        assert await health_endpoint.serve_health(env, str, str) is None
    assert "health endpoint did not start" in caplog.text


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    return answer.decode()

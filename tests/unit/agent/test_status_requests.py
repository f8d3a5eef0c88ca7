"""The endpoint for the progress of a Trainer: what it takes, and what it drops and counts."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.reporting.status_requests import MAX_BODY, TOKEN, URL, StatusRequests
from elasticjob._runtime.contract.messages import Metric, TrainingProgress
from elasticjob._runtime.contract.names import RoundId

ROUND = RoundId(1, 0, 1)


def body(percent: object = 10, **metrics: object) -> bytes:
    """Return what KubeflowCallback sends."""
    named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": {"progressPercentage": percent, "metrics": named}}).encode()


def post(url: str, token: str, data: bytes) -> int:
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"}, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_steps_total_and_metrics_are_taken(tmp_path: Path) -> None:
    requests = StatusRequests(tmp_path, lambda: ROUND)
    env = await requests.start({})
    url, token = env[URL], (tmp_path / "status-token").read_text()
    assert env[TOKEN] == str(tmp_path / "status-token")
    try:
        assert url.startswith("http://127.0.0.1:")
        assert await asyncio.to_thread(post, url, token, body(0, total_steps=40)) == 200
        assert requests.training() is None, "the first request of a Trainer has no step"
        data = body(10, loss=0.5, current_step=4, total_steps=40)
        assert await asyncio.to_thread(post, url, token, data) == 200
        assert requests.training() == TrainingProgress(ROUND, 4, 40, None, (Metric("loss", "0.5"),))
        assert await asyncio.to_thread(post, url, "wrong", body(current_step=5)) == 401
        assert await asyncio.to_thread(post, f"{url}/other", token, body(current_step=5)) == 404
        assert await asyncio.to_thread(post, url, token, b"x" * (MAX_BODY + 1)) == 413
        assert await asyncio.to_thread(post, url, token, b"{}") == 400
        assert requests.dropped == {"token": 1, "path": 1, "size": 1, "content": 1}
        assert '{reason="token"} 1' in requests.metrics()
    finally:
        requests.close()


def test_the_duration_of_a_step_is_measured_and_the_end_is_complete(tmp_path: Path) -> None:
    requests, start = StatusRequests(tmp_path, lambda: ROUND), time.monotonic() + 1000
    for at, data in ((0, body(current_step=10, total_steps=40)), (10, body(current_step=30, total_steps=40))):
        requests.receive(data, start + at)
    assert requests.training() == TrainingProgress(ROUND, 30, 40, 0.5)
    requests.receive(body(100, train_loss=0.1), start + 15)
    assert requests.training() == TrainingProgress(ROUND, 40, 40, 0.5, (Metric("train_loss", "0.1"),))


def test_only_the_node_of_rank_0_takes_reports_and_each_round_begins_anew(tmp_path: Path) -> None:
    rounds: list[RoundId | None] = [None]
    requests, now = StatusRequests(tmp_path, lambda: rounds[0]), time.monotonic() + 1000
    assert requests.receive(body(current_step=1), now) is HTTPStatus.CONFLICT
    rounds[0] = ROUND
    assert requests.receive(body(current_step=1), now) is HTTPStatus.OK
    rounds[0] = RoundId(1, 0, 2)
    assert requests.training() is None


def test_a_flood_is_dropped(tmp_path: Path) -> None:
    requests, now = StatusRequests(tmp_path, lambda: ROUND), time.monotonic() + 1000
    answers = [requests.receive(body(current_step=1), now) for _ in range(12)]
    assert answers == [HTTPStatus.OK] * 10 + [HTTPStatus.TOO_MANY_REQUESTS] * 2
    assert requests.receive(body(current_step=2), now + 1) is HTTPStatus.OK


BAD: list[Any] = [
    b"", b"[]", b"null", b'{"trainerStatus": 3}', b'{"trainerStatus": {"metrics": [1]}}', b"[" * 10000,
    body(current_step="nan"), body(current_step=-1), body(current_step="1e400"), body(total_steps="many"),
    b'{"trainerStatus": {"metrics": 7}}',
]  # fmt: skip


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_report_changes_nothing(tmp_path: Path, data: bytes) -> None:
    requests = StatusRequests(tmp_path, lambda: ROUND)
    assert requests.receive(data, time.monotonic() + 1000) is HTTPStatus.BAD_REQUEST
    assert requests.training() is None


@pytest.mark.parametrize(
    ("env", "added"),
    [
        ({}, {}),
        ({"http_proxy": "http://proxy"}, {"no_proxy": "127.0.0.1"}),
        ({"HTTP_PROXY": "http://proxy", "NO_PROXY": ".svc"}, {"NO_PROXY": ".svc,127.0.0.1"}),
        ({"http_proxy": "http://proxy", "no_proxy": "10.0.0.1,127.0.0.1"}, {}),
        ({"http_proxy": "http://proxy", "no_proxy": "*"}, {}),
    ],
)
async def test_requests_do_not_go_to_a_proxy(tmp_path: Path, env: dict[str, str], added: dict[str, str]) -> None:
    requests = StatusRequests(tmp_path, lambda: ROUND)
    found = await requests.start(env)
    requests.close()
    assert {name: value for name, value in found.items() if name not in (URL, TOKEN)} == added


async def test_the_templates_own_url_stays(tmp_path: Path) -> None:
    assert await StatusRequests(tmp_path, lambda: ROUND).start({URL: "https://kubeflow"}) == {}

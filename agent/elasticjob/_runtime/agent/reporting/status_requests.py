"""Answer the status requests with which a Trainer of transformers reports its progress to Kubeflow.

`KubeflowCallback` of transformers is part of each Trainer where KUBEFLOW_TRAINER_SERVER_URL is set: every 5 s, rank 0
posts its step, the total and its last metrics. Here this agent answers them, on its loopback address: the script needs
no change and no token of the API server, and the operator gets no requests.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from elasticjob._runtime.agent.reporting.reported_training import ReportedStep, ReportedTraining
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import Metric, TrainingProgress
from elasticjob._runtime.contract.names import Env, RoundId, TrainerIntegration
from elasticjob._runtime.contract.text import printable

log = logging.getLogger(__name__)

URL = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105  # the name of the variable, whose value is a path
MAX_BODY = 16384
"""Bytes. A request of a Trainer has a few hundred."""
_MAX_HEAD = 8192
_DIGITS = 9
"""Of a Content-Length."""
_TIMEOUT = 5.0
"""Seconds for a request, and for its answer."""
_MAX_CONNECTIONS = 8
_BURST = 10
"""Requests that may come at once. A Trainer sends one each 5 s, and one more at its begin and end."""
_INTERVAL = 1.0
"""Seconds after which one more may come."""
_MAX_METRICS = 64
_MAX_TEXT = 128
_MAX_STEP = 2**53
_COMPLETE = 100
_LOOPBACK = "127.0.0.1"
_PATH = "/trainer-status"
_REASONS = {
    HTTPStatus.UNAUTHORIZED: "token",
    HTTPStatus.NOT_FOUND: "path",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "size",
    HTTPStatus.TOO_MANY_REQUESTS: "rate",
    HTTPStatus.BAD_REQUEST: "content",
    HTTPStatus.CONFLICT: "rank",
}
"""Why a request is dropped, by the status of its answer."""


def parse_report(body: bytes) -> ReportedStep:
    """Read the body of a request. ValueError if it is not one of Kubeflow's status."""
    try:
        status = codec.loads(body)["trainerStatus"]
        named = {str(metric["name"]): str(metric["value"]) for metric in status.get("metrics") or ()}
        done = status.get("progressPercentage") == _COMPLETE
        step, total = (_steps(named.pop(name, None)) for name in ("current_step", "total_steps"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no trainerStatus: {type(error).__name__}") from None
    metrics = [Metric(printable(name)[:_MAX_TEXT], printable(value)[:_MAX_TEXT]) for name, value in named.items()]
    return ReportedStep(step, total, done, tuple(metrics[:_MAX_METRICS]))


def _steps(text: str | None) -> int | None:
    if text is None:
        return None
    number = float(text)
    if not 0 <= number <= _MAX_STEP:
        raise ValueError("no number of steps")
    return int(number)


class StatusRequests:
    """The endpoint of one agent: `start` it, give workers its variables, and read `training`."""

    def __init__(
        self, scratch: Path, rank_0_round: Callable[[], RoundId | None], on_report: Callable[[], None] = lambda: None
    ) -> None:
        """`rank_0_round` returns the present round if rank 0 is in this pod, else None: only rank 0 reports.

        `on_report` is called with each report that is taken.
        """
        self._token_file = scratch / "status-token"
        self._token = secrets.token_urlsafe(32)
        self._rank_0_round = rank_0_round
        self._on_report = on_report
        self._training: ReportedTraining | None = None
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._allowed, self._allowed_at = float(_BURST), time.monotonic()
        self.dropped: Counter[str] = Counter()
        """Number of requests that were dropped, by reason."""

    async def start(self, env: Mapping[str, str]) -> dict[str, str]:
        """Listen on a port that the kernel chooses. Return the variables for workers whose environment is `env`.

        {} if it sets such a URL itself, if the job wants none of this, or if there is no loopback address.
        """
        if URL in env or env.get(Env.TRAINER_INTEGRATION) == TrainerIntegration.NONE.value:
            return {}
        try:
            self._token_file.write_text(self._token)
            self._token_file.chmod(0o600)
            self._server = await asyncio.start_server(self._answer, _LOOPBACK, 0, limit=_MAX_HEAD)
        except OSError as error:
            log.warning("a Trainer's progress is not in the status unless the script reports it: %s", error)
            return {}
        port = self._server.sockets[0].getsockname()[1]
        return {URL: f"http://{_LOOPBACK}:{port}{_PATH}", TOKEN: str(self._token_file), **_without_proxy(env)}

    def training(self) -> TrainingProgress | None:
        """Return what the script of rank 0 has reported in this round; None without a report."""
        if self._training is None or self._training.round != self._rank_0_round():
            return None
        return self._training.progress

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        name = "elasticjob_agent_dropped_status_requests_total"
        return "".join(f'{name}{{reason="{reason}"}} {n}\n' for reason, n in sorted(self.dropped.items()))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _MAX_CONNECTIONS:
                self._drop(HTTPStatus.TOO_MANY_REQUESTS)
                return
            status = await asyncio.wait_for(self._receive(reader), _TIMEOUT)
            if status is not HTTPStatus.OK:
                self._drop(status)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json"
            writer.write(f"{head}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
            await asyncio.wait_for(writer.drain(), _TIMEOUT)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            self._drop(HTTPStatus.BAD_REQUEST)
        finally:
            self._connections -= 1
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> HTTPStatus:
        """Read a request and take its report. Return the status of the answer."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path = (*first.split(), "", "")[:2]
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
            return HTTPStatus.UNAUTHORIZED
        size = headers.get("content-length", "")
        if (method, path) != ("POST", _PATH) or not (size.isascii() and size.isdecimal()):
            return HTTPStatus.NOT_FOUND
        if len(size) > _DIGITS or int(size) > MAX_BODY:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return self.receive(await reader.readexactly(int(size)), time.monotonic())

    def receive(self, body: bytes, now: float) -> HTTPStatus:
        """Take the body of a request that came at `now`, in seconds. Return the status of its answer."""
        self._allowed = min(float(_BURST), self._allowed + (now - self._allowed_at) / _INTERVAL)
        self._allowed_at = now
        if self._allowed < 1:
            return HTTPStatus.TOO_MANY_REQUESTS
        self._allowed -= 1
        if (round_id := self._rank_0_round()) is None:
            return HTTPStatus.CONFLICT
        try:
            report = parse_report(body)
        except ValueError:
            return HTTPStatus.BAD_REQUEST
        if self._training is None or self._training.round != round_id:
            self._training = ReportedTraining(round_id)
        self._training.add(report, now)
        self._on_report()
        return HTTPStatus.OK

    def _drop(self, status: HTTPStatus) -> None:
        reason = _REASONS.get(status, "content")
        if not self.dropped[reason]:
            log.info("dropped a request with the progress of the training (%s); others are only counted", reason)
        self.dropped[reason] += 1


def _without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that keeps requests to the loopback address away from a proxy; {} without one."""
    if not (env.get("http_proxy") or env.get("HTTP_PROXY")):
        return {}
    name = "no_proxy" if "no_proxy" in env or "NO_PROXY" not in env else "NO_PROXY"
    hosts = env.get(name, "")
    named = {host.strip() for host in hosts.split(",")}
    return {} if named & {_LOOPBACK, "*"} else {name: ",".join(filter(None, (hosts, _LOOPBACK)))}

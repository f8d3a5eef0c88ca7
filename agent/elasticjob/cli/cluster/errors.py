"""Why a request to the cluster failed, as one sentence for the person who typed the command."""

from __future__ import annotations

import json
from typing import Any

from elasticjob._runtime.contract.text import printable
from elasticjob.cli.arguments import USAGE

UNAVAILABLE = 69
"""Exit code: no cluster is reachable. ExitCode.UNAVAILABLE of contract.names has the same meaning for an agent."""

GONE = 410
"""HTTP status of a watch whose first event the API server does not have any more: list again."""


class ClusterError(Exception):
    """A request failed. The text is one sentence. `exit_code`: that of the command."""

    exit_code = 1


class FlagError(ClusterError):
    """A flag is wrong, and nothing was sent. The text says what to write instead."""

    exit_code = USAGE


class NotReachableError(ClusterError):
    """There is no kubeconfig, or no API server answers."""

    exit_code = UNAVAILABLE


class RefusedError(ClusterError):
    """The API server refused the request. `status`: HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def forbidden(self) -> bool:
        """Whether the user lacks the permission."""
        return self.status == 403

    @property
    def not_found(self) -> bool:
        return self.status == 404


def error_of_response(status: int, body: bytes, what: str) -> RefusedError:
    """Return the error of a response that is none of success. `what`: the request, such as `get pod bert-0-0`."""
    answer = _json_object(body)
    message = printable(str(answer.get("message") or body[:200].decode(errors="replace").strip()))
    if status == 401:
        return RefusedError(status, "the API server does not know you: log in again, or choose another --context")
    if status == 403:
        return RefusedError(status, f"you may not {what}: {message}")
    if status == 404:
        return RefusedError(status, _not_found(answer, message, what))
    return RefusedError(status, f"{what}: {message or f'HTTP {status}'}")


def _not_found(answer: dict[str, Any], message: str, what: str) -> str:
    # The name in the answer is another one where the API server asks a Node for a log.
    if (name := answer.get("details", {}).get("name")) and str(name) in what:
        return message
    if "elasticjobs" in what:
        return "the cluster has no ElasticJobs: install the chart, or choose another --context"
    return f"{what}: {message or 'not found'}"


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}

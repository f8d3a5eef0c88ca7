"""Rank 0 of a training loop sends its step, the total and its metrics to the agent, as transformers' Trainer does.

The agent answers these requests on its loopback address (`reporting.status_requests`). A request that fails is the last
one: the training never waits for the status again.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress

from .trainers import TRAINER_INTEGRATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_URL, _TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # names of variables
_AGENT = "http://127.0.0.1:"
"""How the URL of the agent begins. A URL of another server is set by the pod template."""
_INTERVAL = 5.0
"""Seconds from one request to the next. Reading a metric waits for the GPU."""
_TIMEOUT = 1.0
"""Seconds that the training waits for an answer."""
MAX_METRICS = 24


def is_wanted() -> bool:
    """Return whether the job wants the progress of frameworks in its status."""
    return os.environ.get(TRAINER_INTEGRATION) != "None"


def has_agent() -> bool:
    """Return whether an agent takes the progress of this process."""
    return os.environ.get(_URL, "").startswith(_AGENT)


def numbers(metrics: Mapping[Any, Any]) -> dict[str, str]:
    """Return the first metrics that are numbers, or tensors of one element, as text."""
    found: dict[str, str] = {}
    for name, value in list(metrics.items())[:MAX_METRICS]:
        with suppress(TypeError, ValueError, RuntimeError):
            found[str(name)] = f"{float(value):.6g}"
    return found


class StatusSender:
    """Sends the progress of one training, at most once in 5 s and until a request fails."""

    def __init__(self) -> None:
        self._send_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next request."""
        return time.monotonic() >= self._send_at

    @property
    def is_over(self) -> bool:
        """Whether a request has failed."""
        return self._send_at == math.inf

    def send(self, metrics: Mapping[str, str], step: int, total: int | None = None) -> None:
        """Send the metrics, and the number of steps that are done, of `total` if that is known."""
        steps = {"current_step": step} | ({} if total is None else {"total_steps": total})
        taken = post(dict(metrics) | {name: str(value) for name, value in steps.items()})
        self._send_at = time.monotonic() + _INTERVAL if taken else math.inf


def post(metrics: dict[str, str]) -> bool:
    """Send metrics to the agent; return whether it has taken them, or may take later ones."""
    import urllib.error
    import urllib.request

    named = [{"name": name, "value": value} for name, value in metrics.items()]
    body = json.dumps({"trainerStatus": {"metrics": named}}).encode()
    try:
        with open(os.environ[_TOKEN]) as file:
            headers = {"Authorization": f"Bearer {file.read()}"}
        request = urllib.request.Request(os.environ[_URL], body, headers, method="POST")  # noqa: S310
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # too many, or not in this round
    except (OSError, KeyError, ValueError):
        return False

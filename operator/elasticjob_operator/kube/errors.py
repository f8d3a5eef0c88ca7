"""Errors of requests to the API server.

KubeError
├── NotFound        the object (or its namespace) does not exist
├── AlreadyExists   an object of this name exists
├── Conflict        the object has changed since it was read, or has another UID; of a creation: something that admits
│                   it has changed meanwhile, a ResourceQuota, and nothing was created
├── Refused         the API server refused the request and changed nothing: quota, permission, validation
├── Throttled       the API server has too many requests: it changed nothing, and may take the same request soon
└── Unclear         no response, or a server error: the API server may or may not have done it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """A request failed. `status` is the HTTP status; 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFound(KubeError): ...  # noqa: N818  # names of the API's reasons


class AlreadyExists(KubeError): ...  # noqa: N818


class Conflict(KubeError): ...  # noqa: N818


class Refused(KubeError):  # noqa: N818
    @property
    def quota(self) -> bool:
        """Whether a ResourceQuota refused the request."""
        return self.status == 403 and "exceeded quota" in str(self)

    @property
    def invalid(self) -> bool:
        """Whether the object itself is wrong: it is invalid, lacks requests that a ResourceQuota demands, or violates
        the namespace's pod security level."""
        wrong = ("failed quota", "violates PodSecurity")
        return self.status in (400, 422) or any(part in str(self) for part in wrong)


class Throttled(KubeError): ...  # noqa: N818


class Unclear(KubeError): ...  # noqa: N818


def error_from(status: int, answer: Mapping[str, Any], what: str) -> KubeError:
    """Return the error for an HTTP status; `answer` is a metav1.Status or empty, `what` the request in words."""
    reason = answer.get("message") or answer.get("reason") or f"HTTP {status}"
    message = f"{what}: {reason}"
    if status == 404:
        return NotFound(message, status)
    if status == 409:
        kind = AlreadyExists if answer.get("reason") == "AlreadyExists" else Conflict
        return kind(message, status)
    if status == 429:
        return Throttled(message, status)
    if 400 <= status < 500 and status != 408:
        return Refused(message, status)
    return Unclear(message, status)

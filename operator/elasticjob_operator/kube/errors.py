"""What can go wrong between the operator and the API server.

KubeError
├── NotFound        there is no such object
├── AlreadyExists   an object of this name is there
├── Conflict        the object has changed since it was read, or has another uid
├── Refused         the server said no, and nothing was done: quota, permission, validation
└── Unclear         no answer, or a broken one: it may or may not have been done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """A request that did not succeed. `status` is HTTP's; 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFound(KubeError): ...  # noqa: N818  # the API's own names


class AlreadyExists(KubeError): ...  # noqa: N818


class Conflict(KubeError): ...  # noqa: N818


class Refused(KubeError):  # noqa: N818
    @property
    def quota(self) -> bool:
        """Whether a ResourceQuota said no."""
        return self.status == 403 and "exceeded quota" in str(self)


class Unclear(KubeError): ...  # noqa: N818


def error_from(status: int, answer: Mapping[str, Any], what: str) -> KubeError:
    """The error for an answer that is not a success; `answer` is a metav1.Status, or empty."""
    said = answer.get("message") or answer.get("reason") or f"HTTP {status}"
    message = f"{what}: {said}"
    if status == 404:
        return NotFound(message, status)
    if status == 409:
        kind = AlreadyExists if answer.get("reason") == "AlreadyExists" else Conflict
        return kind(message, status)
    if 400 <= status < 500 and status != 408:
        return Refused(message, status)
    return Unclear(message, status)

"""Errors that end a wrapped function.

RestartError      the rank cannot be part of the next iteration; base class of the next two
HealthCheckError  a health check failed
InternalError     the wrapper cannot go on
RestartAbort      a hook ends the job: no restart follows (a BaseException)
"""

from __future__ import annotations


class RestartError(RuntimeError):
    """The rank cannot be part of the next iteration. All errors of the wrapper derive from it."""


class HealthCheckError(RestartError):
    """A health check failed; `__cause__` is its exception."""


class InternalError(RestartError):
    """The wrapper cannot go on: a finalize failed, or a function failed and no restart came."""


class RestartAbort(BaseException):
    """Raised by a hook: this rank leaves, and nothing restarts it. No `Exception`, because these cause a restart."""

"""Ends, for processes and for people: exit codes, and one line on a failure. Pure."""

from __future__ import annotations

from typing import NoReturn

from elasticjob.contract.messages import (
    Failure,
    FailureClass,
    Finish,
    Outcome,
)
from elasticjob.contract.names import ExitCode


def exit_code(finish: Finish) -> ExitCode:
    """The agent's exit code for an outcome."""
    match finish.outcome:
        case Outcome.SUCCEEDED:
            return ExitCode.SUCCEEDED
        case Outcome.FAILED:
            return ExitCode.FAILED
        case Outcome.LEFT:
            return ExitCode.LEFT
        case Outcome.SUPERSEDED:
            return ExitCode.SUPERSEDED
        case Outcome.ERROR:
            special = {"StoreUnreachable": ExitCode.UNAVAILABLE, "JoinTimeout": ExitCode.JOIN_TIMEOUT}
            return special.get(finish.reason, ExitCode.INTERNAL)
        case _ as never:
            return assert_never(never)


def describe_failure(failure: Failure) -> str:
    """One line for people: `rank 3 died: ValueError: bad batch (exit 1, UserError)`."""
    who = "the node" if failure.rank is None else f"rank {failure.rank}"
    said = failure.message.splitlines()[-1] if failure.message else ""
    if failure.kind in (FailureClass.DEVICE_UNHEALTHY, FailureClass.HANG):
        return f"{who}: {failure.message.partition(chr(10))[0]} ({failure.kind.value})"
    if failure.exit_code is None and not failure.signal:
        return f"{who} did not start: {said} ({failure.kind.value})"
    end = failure.signal or f"exit {failure.exit_code}"
    if failure.exception:
        return f"{who} died: {failure.exception}: {said} ({end}, {failure.kind.value})"
    return f"{who} died: {end} ({failure.kind.value}){f'; its last line: {said}' if said else ''}"


def assert_never(value: NoReturn) -> NoReturn:
    """As typing's, which Python 3.10 lacks."""
    raise AssertionError(f"not handled: {value!r}")

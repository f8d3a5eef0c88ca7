"""Exit codes of the agent, and one-line descriptions of failures. Pure."""

from __future__ import annotations

from typing import NoReturn

from elasticjob._runtime.contract.failures.failure_text import in_stage, last_line, with_exception
from elasticjob._runtime.contract.messages import Failure, FailureClass, Finish, Outcome
from elasticjob._runtime.contract.names import ExitCode


def exit_code(finish: Finish) -> ExitCode:
    """Return the agent's exit code for an outcome."""
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
            return ExitCode.UNAVAILABLE if finish.reason == "StoreUnreachable" else ExitCode.INTERNAL
        case _ as never:
            return assert_never(never)


def describe_failure(failure: Failure) -> str:
    """Return one sentence for users: `rank 3 died: ValueError: bad batch (exit 1, UserError)`."""
    subject = ("node" if failure.rank is None else f"rank {failure.rank}") + in_stage(failure.stage)
    line = failure.message.splitlines()[-1] if failure.message else ""
    if failure.kind in (FailureClass.DEVICE_UNHEALTHY, FailureClass.HANG) or failure.log_rule:
        return f"{subject}: {failure.message.partition(chr(10))[0]} ({failure.kind.value})"
    if failure.exit_code is None and not failure.signal:
        return f"{subject} did not start: {line} ({failure.kind.value})"
    end = failure.signal or f"exit {failure.exit_code}"
    if failure.kind is FailureClass.START_ERROR and line:
        return f"{subject} did not start: {line} ({end}, {failure.kind.value})"
    if failure.exception:
        return f"{subject} died: {with_exception(failure.exception, line)} ({end}, {failure.kind.value})"
    if not failure.signal and (quoted := last_line(failure.message)):  # a signal leaves no time to say why
        end += f": {quoted}"
    return f"{subject} died: {end} ({failure.kind.value})"


def assert_never(value: NoReturn) -> NoReturn:
    """Fail on a case that no branch handles. `typing` has this function only from Python 3.11 on."""
    raise AssertionError(f"not handled: {value!r}")

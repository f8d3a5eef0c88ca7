"""One sentence about a failure, for conditions, Events and the last line of an agent. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from elasticjob._runtime.contract.messages import Failure, FailureClass

MAX_MESSAGE = 1024
"""Characters of a failure's message."""
MAX_LINE = 120
"""Characters of a worker's last line that a sentence quotes."""
MAX_RANKS = 8
"""Ranks that a sentence lists."""

HANG_FAILS_THE_JOB = "training hung and hangPolicy.action is FailJob"
LOG_RULE_REASON = "LogRule"
"""Reason of a failure that a rule of spec.logRules has found."""
REASON_BY_CLASS = {FailureClass.HANG: "HangDetected", FailureClass.DEVICE_UNHEALTHY: "DeviceUnhealthy"}
"""Reasons of failures that leave neither an exception nor a signal; the Restarting condition uses them too."""

_OUT_OF_MEMORY = "out of memory (OOMKilled: SIGKILL"
"""The beginning of a message by `describe_out_of_memory`."""

_WAITED_FOR_RANKS = re.compile(
    r"wait timeout after|waiting for clients|client socket has timed out|connectFullMesh failed", re.IGNORECASE
)
"""torch's messages about ranks that did not meet in time, for example to create a process group."""
_NOT_MET = (
    "not all ranks met in time: one is slow or stuck (see the logs of all pods), or pods cannot connect to each other "
    "(a NetworkPolicy or a firewall)"
)


def failure_reason(failure: Failure) -> str:
    """Return the reason of a failure in status: OOMKilled, LogRule, the exception, the signal, or one by its class."""
    if failure.log_rule:
        return LOG_RULE_REASON
    if failure.kind is FailureClass.OOM_KILLED:
        return str(failure.kind.value)
    return failure.exception or failure.signal or REASON_BY_CLASS.get(failure.kind, "Error")


def with_exception(exception: str, text: str) -> str:
    """Return the text with the exception's name before it, unless it begins with it: that of one without a text."""
    if text == exception or text.startswith(f"{exception} ("):
        return text
    return f"{exception}: {text}" if text else exception


def describe_worker_failure(failure: Failure) -> str:
    """Return one line about a failure that an agent reported: rank and pod, then the cause."""
    place = failure.pod if failure.rank is None else f"rank {failure.rank} in {failure.pod}"
    cause = describe_cause(
        failure_reason(failure),
        failure.kind.value,
        failure.message,
        exception=failure.exception,
        signal=failure.signal,
        exit_code=failure.exit_code,
        of_worker=failure.rank is not None,
    )
    return f"{place} failed{in_stage(failure.stage)}: {cause}"


def in_stage(stage: int) -> str:
    """Return where a failure or a round is, if the job has reached more than one stage; empty otherwise."""
    return f" in stage {stage}" if stage > 1 else ""


def describe_cause(
    reason: str,
    failure_class: str,
    message: str,
    *,
    exception: str = "",
    signal: str = "",
    exit_code: int | None = None,
    of_worker: bool = True,
) -> str:
    """Return the exception with the first line of its message, or the signal, or the exit code, or the reason.

    `of_worker`: the message of a worker that exited is the end of its log, so its last line is quoted; the message of a
    pod is its agent's own.
    """
    line = next(iter(message.strip().splitlines()), "")
    if failure_class == FailureClass.OOM_KILLED.value:
        return line if line.startswith(_OUT_OF_MEMORY) else describe_out_of_memory()
    if exception:
        cause = with_exception(exception, line)
        waited = failure_class == FailureClass.COLLECTIVE_FAILED.value and _WAITED_FOR_RANKS.search(line)
        return f"{cause}; {_NOT_MET}" if waited else cause
    if signal:
        cause = signal if reason in (signal, "Error") else f"{reason} ({signal})"
        return cause if of_worker or not line or signal in line else f"{cause}: {line}"
    if exit_code is not None:
        code = f"exit code {exit_code}"
        line = last_line(message) if of_worker else line
        return code if not line or code in line else f"{code}: {line}"
    cause = failure_class if reason == "Error" else reason
    return f"{cause}: {line}" if line else cause


def last_line(text: str) -> str:
    """Return the last line with a letter or a digit, shortened; empty without one."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if any(map(str.isalnum, line))), "")
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3].rstrip()}..."


def describe_out_of_memory(limit: str = "", *, unlimited: bool = False) -> str:
    """Return what has happened and what to do.

    `limit`: the container's memory limit, empty if it is not known. `unlimited`: the container has no limit.
    """
    if unlimited:
        return (
            f"{_OUT_OF_MEMORY}; the container has no memory limit of its own, so the Node or a limit of the pod was "
            "exhausted): request more memory, or use less"
        )
    of = f" of {limit}" if limit else ""
    return f"{_OUT_OF_MEMORY} at the container's memory limit{of}): raise resources.limits.memory, or use less"


def describe_size(count: int) -> str:
    """Return a number of bytes in the largest binary unit of Kubernetes that divides it, such as `300Mi`."""
    for unit, shift in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return str(count)


def with_ended_ranks(failure: Failure, ranks: Collection[int]) -> Failure:
    """Return a failed collective whose message names the ranks that had already ended with success; it unchanged
    without any."""
    if not ranks:
        return failure
    first, newline, rest = failure.message.partition("\n")
    listed = sorted(ranks)
    names = ", ".join(map(str, listed[:MAX_RANKS]))
    if len(listed) > MAX_RANKS:
        names += f" and {len(listed) - MAX_RANKS} more"
    subject = f"rank {names}" if len(listed) == 1 else f"ranks {names}"
    note = f"{subject} had already ended with success: all ranks must make the same number of steps"
    room = MAX_MESSAGE - len(note) - 2
    line = f"{first[:room].rstrip('. ')}; {note}" if first else note
    return replace(failure, ended_ranks=tuple(listed), message=f"{line}{newline}{rest}"[:MAX_MESSAGE])

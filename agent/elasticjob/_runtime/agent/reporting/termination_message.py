"""The termination message: JSON of at most 4096 bytes, the outcome first.

An agent that is killed cannot write it. So the agent writes its round there before it starts workers: the operator
then knows which failures belong together.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import InRound, Termination
from elasticjob._runtime.contract.names import RoundId

TERMINATION_LOG = "/dev/termination-log"
"""File of the message, unless the pod sets terminationMessagePath."""
MAX_BYTES = 4096
"""The kubelet cuts a container's termination message to this length."""


def termination_json(termination: Termination, limit: int = MAX_BYTES) -> bytes:
    """Return JSON of at most `limit` bytes: long texts are shortened; outcome, round and ranks always stay."""
    data = codec.dumps(termination)
    width = limit
    while len(data) > limit and width > 8:
        width //= 2
        data = codec.dumps(_shorten(termination, width))
    return data


def _shorten(termination: Termination, width: int) -> Termination:
    failure = termination.failure
    if failure is not None:
        failure = replace(
            failure,
            exception=_cut(failure.exception, width),
            message=_cut(failure.message, width),
            pod=_cut(failure.pod, 253),
        )
    return replace(
        termination, reason=_cut(termination.reason, width), message=_cut(termination.message, width), failure=failure
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def write_termination(path: str, termination: Termination) -> None:
    """Write the message to `path` in one write, so that a reader never sees a part of it. Raise OSError on failure."""
    _write(path, termination_json(termination))


def write_round(path: str, round_id: RoundId) -> None:
    """Write the round whose workers start, for the case that the agent is killed. Raise OSError on failure."""
    _write(path, codec.dumps(InRound(round_id)))


def read_round(path: str) -> RoundId | None:
    """Return the round that `write_round` wrote; None if there is none."""
    with contextlib.suppress(OSError, codec.MessageError), open(path, "rb") as file:
        return codec.parse(InRound, codec.loads(file.read(MAX_BYTES))).round
    return None


def _write(path: str, data: bytes) -> None:
    # The file is not made empty first: to write such a file again, ext4 waits for the disk.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        os.write(descriptor, data.ljust(min(before, MAX_BYTES)))  # spaces over the rest of a longer message
        if before > len(data):
            os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)

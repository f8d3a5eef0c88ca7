"""What a worker's end means, and which of many ends is the cause. Pure; used by agent, coordinator and operator."""

from __future__ import annotations

import re
from collections.abc import Iterable

from elasticjob.contract.messages import Failure, FailureClass

_COLLECTIVE = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|"
    r"gloo|Gloo|NCCL (error|watchdog|communicator)|ncclRemoteError|ncclSystemError|"
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"Socket Timeout|ProcessGroup\w+ .*(timed? ?out|abort)|collective operation timeout"
)
"""What torch and its backends say when a peer is gone: an effect of somebody else's failure."""

_NOT_PYTHON = {"SIGKILL": FailureClass.KILLED, "SIGTERM": FailureClass.KILLED, "SIGINT": FailureClass.KILLED}

_START_EXITS = (126, 127)
"""A shell's codes for a command that cannot be executed or does not exist."""


def classify(exit_code: int | None, signal: str, exception: str, message: str) -> FailureClass:
    """The class of one worker's end, from its exit code or signal name and what it said last.

    A crash (SIGSEGV, SIGABRT ...) is the user's code, except where NCCL's watchdog aborts for a lost peer.
    """
    if _COLLECTIVE.search(f"{exception}: {message}"):
        return FailureClass.COLLECTIVE_FAILED
    if signal:
        return _NOT_PYTHON.get(signal, FailureClass.USER_ERROR)
    if exit_code in _START_EXITS and not exception:
        return FailureClass.START_ERROR
    return FailureClass.USER_ERROR


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure to blame: the first in order of arrival that is not the echo of another; None without failures.

    Arrival order, because clocks of different hosts do not compare.
    """
    ordered = tuple(failures)
    own = (f for f in ordered if f.kind is not FailureClass.COLLECTIVE_FAILED)
    return next(own, ordered[0] if ordered else None)

"""What a worker's end means, and which of many ends is the cause. Pure; used by agent, coordinator and operator."""

from __future__ import annotations

import re
from collections.abc import Iterable

from elasticjob.contract.messages import Failure, FailureClass

_DEVICE = re.compile(
    r"uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|GPU is lost|fallen off the bus|"
    r"CUDA error: (system not yet initialized|Invalid access of peer GPU memory)"
)
"""What CUDA says of a GPU that needs a reset or another machine. A failed assertion or a wrong address is not that."""

_TORCH_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_RENDEZVOUS_ERRORS = frozenset({"RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError"})
"""A torchrun's, that misses its peers."""
_OWN_NCCL = re.compile(r"ncclUnhandledCudaError|ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU")
"""NCCL refuses what this very worker did."""
_ECHO = re.compile(
    r"gloo/\S+\.cc:\d+\] (Connection|Timed out|Socket|Read|Write|recv|send|Application timeout)|"
    r"Gloo connectFullMesh failed|Connection closed by peer|Connection reset by peer|"
    r"ncclRemoteError|ncclSystemError|NCCL communicator (was aborted|encountered error)|"
    r"remote process exited or there was a network error|"
    r"collective operation timeout|taking the entire process down|"
    r"client socket has (timed out|failed)|Did the remote server shutdown or crash|"
    r"wait timeout after \d+ms"
)
"""What torch and its backends say when a peer is gone: an effect of somebody else's failure."""

_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
_BY_KERNEL = re.compile(r"killed by signal: Killed")
"""A data loader's worker was the one that the kernel chose."""
_START_EXITS = (126, 127)
"""A shell's codes for a command that cannot be executed or does not exist."""
_NO_PROGRAM = re.compile(r"can't open file|No module named \S+$|: command not found")


HANG_GRACE = 0.3
"""Seconds from SIGTERM to SIGKILL at most where a worker hangs: its peers have nothing left to save."""


def classify(
    exit_code: int | None, signal: str, exception: str, message: str, *, oom_killed: bool = False
) -> FailureClass:
    """The class of one worker's end, from its exit code or signal name and what it said last.

    `oom_killed`: the kernel has killed for memory in this container since the last such end. A crash (SIGSEGV,
    SIGABRT ...) is the user's code, except where NCCL's watchdog aborts for a lost peer. Texts of network errors
    count only in the words of torch: a script may talk to other hosts than its peers.
    """
    if oom_killed and (signal == "SIGKILL" or _BY_KERNEL.search(message)):
        return FailureClass.OOM_KILLED
    if signal in _FROM_OUTSIDE and not exception:
        return FailureClass.KILLED
    if _DEVICE.search(message):
        return FailureClass.DEVICE_UNHEALTHY
    if _is_echo(exception, message):
        return FailureClass.COLLECTIVE_FAILED
    if not exception and not signal and (exit_code in _START_EXITS or (exit_code == 2 and _NO_PROGRAM.search(message))):
        return FailureClass.START_ERROR
    return FailureClass.USER_ERROR


def _is_echo(exception: str, message: str) -> bool:
    if exception in _RENDEZVOUS_ERRORS:
        return True
    if exception in _TORCH_ERRORS:
        return not _OWN_NCCL.search(message)
    return exception in ("", "RuntimeError") and _ECHO.search(message) is not None


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure to blame: the first in order of arrival that is not the echo of another; None without failures.

    Arrival order, because clocks of different hosts do not compare; a node tells its own in order of time. Of a hang
    every node tells: the worker to blame is the farthest behind, and rather one that does not wait for others.
    """
    ordered = tuple(failures)
    own = (f for f in ordered if f.kind is not FailureClass.COLLECTIVE_FAILED)
    cause = next(own, ordered[0] if ordered else None)
    if cause is None or cause.kind is not FailureClass.HANG:
        return cause
    return min((f for f in ordered if f.kind is FailureClass.HANG), key=_behind)


def _behind(hang: Failure) -> tuple[bool, int, bool]:
    return (hang.step is None, hang.step or 0, hang.waits_for_peers)

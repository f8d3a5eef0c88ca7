"""Classify the failure of a worker, and find the root cause among several failures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.system.code_root import OWN_PACKAGE

_DEVICE = re.compile(
    r"uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|GPU is lost|fallen off the bus|"
    r"CUDA error: (system not yet initialized|Invalid access of peer GPU memory)"
)
"""CUDA's messages for a GPU that needs a reset, or whose Node must be replaced. Device assertions and bad addresses are
not among them: a script causes these."""

_TORCH_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_RENDEZVOUS_ERRORS = frozenset({"RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError"})
"""Exceptions of a torchrun that does not find its peers."""
_NCCL_USAGE = re.compile(r"ncclUnhandledCudaError|ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU")
"""NCCL errors that the failing worker itself caused."""
_PEER_FAILED = re.compile(
    r"gloo/\S+\.cc:\d+\] (Connection|Timed out|Socket|Read|Write|recv|send|Application timeout)|"
    r"Gloo connectFullMesh failed|Connection closed by peer|Connection reset by peer|"
    r"ncclRemoteError|ncclSystemError|NCCL communicator (was aborted|encountered error)|"
    r"remote process exited or there was a network error|"
    r"collective operation timeout|taking the entire process down|"
    r"client socket has (timed out|failed)|Did the remote server shutdown or crash|"
    r"wait timeout after \d+ms"
)
"""Messages of torch and its backends after a peer has failed: an effect, not a cause."""

_OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
"""torch's message after a SIGKILL of a data loader's process: the kernel may have chosen that one for its memory."""
_START_EXIT_CODES = (126, 127)
"""A shell's exit codes for a command that cannot be executed or does not exist."""
_NO_PROGRAM = re.compile(r"can't open file|No module named \S+$|: command not found")


_FRAME = re.compile(r'  (?:\| +)?File "(.+)", line (\d+)')
"""The line of a frame in a traceback, also in that of a group of exceptions but not in those of its members."""
_INSTALLED_PACKAGE = re.compile(r".*/(site|dist)-packages/elasticjob/")
"""Start of the paths of elasticjob's files where the worker's image has it installed."""
_LIBRARY_FILE = re.compile(r"/(site|dist)-packages/|/lib/python\d[^/]*/|^<(?!string>|stdin>)")
"""Files of installed packages and of Python itself; `<string>` and `<stdin>` are programs of the user."""

HANG_GRACE = 0.3
"""Longest time from SIGTERM to SIGKILL after a hang, in seconds: the hanging group has nothing left to save."""


def classify(
    exit_code: int | None, signal: str, exception: str, message: str, *, oom_killed: bool = False
) -> FailureClass:
    """Return the class of one worker's failure.

    `signal` and `exception` are names, empty if there was none. `message` is the exception's message or the last log
    lines. `oom_killed`: the kernel has killed a process of this container for memory, and no earlier failure accounts
    for that kill.

    A crash (SIGSEGV, SIGABRT, ...) is a user error, except where NCCL's watchdog aborts after a peer failed. Texts of
    network errors count only in torch's own exceptions, because a script may use the network for other purposes.
    """
    if oom_killed and (signal == "SIGKILL" or _CHILD_KILLED.search(message)):
        return FailureClass.OOM_KILLED
    if signal in _OUTSIDE_SIGNALS and exception in ("", "KeyboardInterrupt"):
        return FailureClass.KILLED
    if _DEVICE.search(message):
        return FailureClass.DEVICE_UNHEALTHY
    if _caused_by_peer(exception, message):
        return FailureClass.COLLECTIVE_FAILED
    if not exception and not signal and _did_not_start(exit_code, message):
        return FailureClass.START_ERROR
    return FailureClass.USER_ERROR


def _caused_by_peer(exception: str, message: str) -> bool:
    if exception in _RENDEZVOUS_ERRORS:
        return True
    if exception in _TORCH_ERRORS:
        return not _NCCL_USAGE.search(message)
    return exception in ("", "RuntimeError") and _PEER_FAILED.search(message) is not None


def _did_not_start(exit_code: int | None, message: str) -> bool:
    return exit_code in _START_EXIT_CODES or (exit_code == 2 and _NO_PROGRAM.search(message) is not None)


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure to blame, None without failures.

    It is the first one, in order of arrival, that is not a failed collective; the first one if all are. Order of
    arrival, because clocks of different hosts cannot be compared; each pod reports its own failures in order of time.

    Every pod reports a hang. If the cause is a hang, the result is the worker with the lowest step; of several, one
    that does not wait for its peers.
    """
    ordered = tuple(failures)
    causes = (f for f in ordered if f.kind is not FailureClass.COLLECTIVE_FAILED)
    cause = next(causes, ordered[0] if ordered else None)
    if cause is None or cause.kind is not FailureClass.HANG:
        return cause
    return min((f for f in ordered if f.kind is FailureClass.HANG), key=_progress)


def innermost_place(trace: str) -> str:
    """Return the innermost place of the user's code in the last traceback of a text, such as `train.py, line 12`.

    Empty without one.
    """
    place = ""
    for line in trace.splitlines():
        if line.endswith("Traceback (most recent call last):") and not line.startswith("    "):
            place = ""
        place = place_of(line) or place
    return place


def place_of(line: str) -> str:
    """Return the place that the line of a frame names if it is in the user's code; else empty."""
    match = _FRAME.match(line)
    if match is None or own_file(match[1]) or _LIBRARY_FILE.search(match[1]):
        return ""
    return f"{match[1].rpartition('/')[2]}, line {match[2]}"


def own_file(path: str) -> str:
    """Return the path of a file within the package `elasticjob`, such as `training/state.py`; empty for other files.

    A worker has the package from where this process has it, or from its image. A folder of the user's that has the same
    name is neither.
    """
    if path.startswith(OWN_PACKAGE):
        return path[len(OWN_PACKAGE) :]
    installed = _INSTALLED_PACKAGE.match(path)
    return path[installed.end() :] if installed else ""


def _progress(hang: Failure) -> tuple[bool, int, bool]:
    return (hang.step is None, hang.step or 0, hang.waits_for_peers)

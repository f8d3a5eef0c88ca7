"""Preload learning: later workers need not repeat the imports of the first ones.

A script that imports much more than the fork server preloads (transformers, say) spends those seconds at each start.
So one worker reports, after its first optimizer step, what it has imported beyond the preloaded modules. The fork
server then forks a candidate, which imports the libraries in the report while the training runs (`preload_trial`). If
the candidate passes its checks and saves enough time, it is promoted: it replaces the fork server. Otherwise it ends
and the fork server stays as it is.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import zlib
from contextlib import suppress
from typing import NamedTuple, NoReturn

_MAX_REPORT = 16 << 20
"""Bytes of a report: a worker's program may send anything."""


class Baseline(NamedTuple):
    """Modules and environment of the fork server after its imports: every fork starts with them."""

    modules: frozenset[str]
    environment: dict[str, str]


class ImportReport(NamedTuple):
    """The differences between a worker and the baseline after its first optimizer step."""

    modules: list[tuple[str, str]]
    """(name, file) of imported modules, in the order in which their imports began."""
    package: str
    """Top-level package of the worker's program; empty if the program is not a module."""
    directory: str
    """Directory of the worker's program, which may be installed among the libraries."""
    environment: dict[str, str | None]
    """Variables whose value differs; None: the variable is not set any more."""
    set_by_program: list[str]
    """Those variables that the program or its imports have changed."""


# ---- in a worker -------------------------------------------------------------------------------------------------


def report_imports_at_first_step(channel: int, baseline: Baseline) -> None:
    """Send an `ImportReport` to the channel (a descriptor) after an optimizer's first step: imports are done by then.

    Calls while torch compiles the step are ignored. Without torch the channel is closed at once.
    """
    register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    compiling = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_compiling", None)
    if register is None or compiling is None:
        os.close(channel)
        return
    process, file = os.getpid(), os.fstat(channel).st_ino
    environment, reported = dict(os.environ), False

    def report_once(*_: object) -> None:
        nonlocal reported
        if reported or compiling():
            return
        reported = True
        with suppress(Exception):
            # The program may have closed the descriptor and opened another file under its number.
            if os.getpid() == process and os.fstat(channel).st_ino == file:
                os.set_blocking(channel, False)
                os.write(channel, zlib.compress(json.dumps(_report(baseline, environment)).encode(), 1))
                os.close(channel)

    register(report_once)


def _report(baseline: Baseline, before: dict[str, str]) -> ImportReport:
    """Return the report. `before` is the worker's environment at its start."""
    specs = [(name, getattr(sys.modules[name], "__spec__", None)) for name in [*sys.modules] if name in sys.modules]
    modules = [
        (name, spec.origin)
        for name, spec in specs
        if name not in baseline.modules and spec is not None and spec.name == name and spec.has_location
    ]
    main = sys.modules["__main__"]
    package = main.__spec__.name.partition(".")[0] if main.__spec__ else ""
    directory = os.path.dirname(os.path.realpath(getattr(main, "__file__", None) or "/"))  # noqa: PTH120
    now = dict(os.environ)
    return ImportReport(modules, package, directory, _changes(baseline.environment, now), [*_changes(before, now)])


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    return {n: after.get(n) for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)}


# ---- in the fork server ------------------------------------------------------------------------------------------


class PreloadLearning:
    """The sockets on which workers report until one report has come; then the candidate."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.wants_reports = True
        """Whether no report has come yet."""
        self._channels: list[socket.socket] = []
        self._candidate: tuple[int, socket.socket] | None = None
        """Process id, and the socket for its result."""

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets to wait on."""
        return [*self._channels, *([self._candidate[1]] if self._candidate else [])]

    def listen(self, channel: socket.socket) -> None:
        """Accept the report of a worker on this socket."""
        self._channels.append(channel)

    def receive(self, channel: socket.socket) -> ImportReport | None:
        """Return the report of a worker; None if the worker has ended, or if the socket is not a worker's."""
        if channel not in self._channels:
            return None
        with suppress(OSError, ValueError, TypeError, RecursionError, zlib.error):
            text = zlib.decompressobj().decompress(channel.recv(1 << 20), _MAX_REPORT)
            report = ImportReport(*json.loads(text))
            self._close_channels()
            return report
        self._channels.remove(channel)
        channel.close()
        return None

    def _close_channels(self) -> None:
        """Accept no more reports."""
        self.wants_reports = False
        for channel in self._channels:
            channel.close()
        self._channels = []

    def fork_candidate(self) -> socket.socket | None:
        """Fork the candidate. Like os.fork this returns twice: in the candidate the socket for its result, in the fork
        server None."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            return theirs
        theirs.close()
        self._candidate = pid, ours
        return None

    def candidate_ready(self, ready: socket.socket) -> bool:
        """Return whether the socket is the candidate's and its result allows promotion.

        If its result does not, the candidate has ended when this returns. Both results are logged.
        """
        if self._candidate is None or ready is not self._candidate[1]:
            return False
        pid, _ = self._candidate
        answer = ready.recv(1 << 16)
        if answer:
            result = json.loads(answer)
            if result["ready"]:
                saved = f"this saves {result['seconds']:.1f} s of each start"
                _log(f"libraries that the last workers imported are now preloaded; {saved}")
                return True
            if result["reason"]:
                _log_rejection(result["reason"])
        self._candidate = None
        ready.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not answer:
            _log_rejection(f"the process that imported them ended with exit code {code}")
        return False

    def promote_candidate(self) -> NoReturn:
        """Let the candidate answer requests. This process stays its parent, and ends when the candidate ends.

        The agent knows the fork server by the process id of the first one.
        """
        assert self._candidate is not None  # noqa: S101
        pid, control = self._candidate
        control.send(b"go")
        os.waitpid(pid, 0)
        os._exit(0)


def _log_rejection(reason: str) -> None:
    _log(f"libraries that the last workers imported are not preloaded: {reason}")


def _log(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)

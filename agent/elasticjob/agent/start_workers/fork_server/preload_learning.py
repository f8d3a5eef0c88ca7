"""Imports learned from the first workers, so that later ones need not repeat them.

A script that imports much more than is preloaded (transformers, say) would spend those seconds at each of its starts.
So a worker tells once, after its first step, what it has imported and the warm process has not. A process forked from
the warm process, the student, imports the libraries among that beside the training (`student`). Where it may be
trusted and saves something, it takes the place of the warm process; else it ends, and nothing has changed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import zlib
from contextlib import suppress
from typing import NamedTuple


class Baseline(NamedTuple):
    """What every worker begins with."""

    modules: frozenset[str]
    environment: dict[str, str]


class ImportReport(NamedTuple):
    """What a worker has beyond its birth."""

    modules: list[tuple[str, str]]
    """(name, file), in the order in which their imports began."""
    package: str
    directory: str
    """Those of its program, which may be installed among the libraries."""
    environment: dict[str, str | None]
    """What differs; None: not there any more."""
    own: list[str]
    """Variables among those that its program has changed, or what it imports."""


# ---- in a worker -------------------------------------------------------------------------------------------------


def report_imports_at_first_step(channel: int, birth: Baseline) -> None:
    """Send a `Report` into the channel (a descriptor) once an optimizer has made a step: imports are done by then."""
    register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    compiling = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_compiling", None)
    if register is None or compiling is None:
        os.close(channel)
        return
    process, file = os.getpid(), os.fstat(channel).st_ino
    environment, told = dict(os.environ), False

    def tell(*_: object) -> None:
        nonlocal told
        if told or compiling():
            return
        told = True
        with suppress(Exception):
            # A program may close what it does not know, and open something else.
            if os.getpid() == process and os.fstat(channel).st_ino == file:
                os.set_blocking(channel, False)
                os.write(channel, zlib.compress(json.dumps(_report(birth, environment)).encode(), 1))
                os.close(channel)

    register(tell)


def _report(birth: Baseline, before: dict[str, str]) -> ImportReport:
    specs = [(name, getattr(sys.modules[name], "__spec__", None)) for name in [*sys.modules] if name in sys.modules]
    modules = [
        (name, spec.origin)
        for name, spec in specs
        if name not in birth.modules and spec is not None and spec.name == name and spec.has_location
    ]
    main = sys.modules["__main__"]
    package = main.__spec__.name.partition(".")[0] if main.__spec__ else ""
    directory = os.path.dirname(os.path.realpath(getattr(main, "__file__", None) or "/"))  # noqa: PTH120
    now = dict(os.environ)
    return ImportReport(modules, package, directory, _changes(birth.environment, now), [*_changes(before, now)])


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    return {n: after.get(n) for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)}


# ---- in the warm process -----------------------------------------------------------------------------------------


class PreloadLearning:
    """Where workers report, until one has; then the student."""

    def __init__(self, birth: Baseline) -> None:
        self.baseline = birth
        self.wants_reports = True
        """Whether a report is still wanted."""
        self._channels: list[socket.socket] = []
        self._student: tuple[int, socket.socket] | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """To listen to."""
        return [*self._channels, *([self._student[1]] if self._student else [])]

    def listen(self, channel: socket.socket) -> None:
        """A worker may report here."""
        self._channels.append(channel)

    def receive(self, channel: socket.socket) -> ImportReport | None:
        """What a worker says; None: it has ended, or this is no worker."""
        if channel not in self._channels:
            return None
        with suppress(OSError, ValueError, TypeError, zlib.error):
            report = ImportReport(*json.loads(zlib.decompress(channel.recv(1 << 20))))
            self.close()
            return report
        self._channels.remove(channel)
        channel.close()
        return None

    def close(self) -> None:
        """Want no reports any more."""
        self.wants_reports = False
        for channel in self._channels:
            channel.close()
        self._channels = []

    def fork_candidate(self) -> socket.socket | None:
        """In the student: its way to say what became of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            return theirs
        theirs.close()
        self._student = pid, ours
        return None

    def candidate_ready(self, said: socket.socket) -> bool:
        """Whether it is the student that says something, and may take over; if not, it is gone after this."""
        if self._student is None or said is not self._student[1]:
            return False
        pid, _ = self._student
        answer = said.recv(1 << 16)
        if answer:
            verdict = json.loads(answer)
            if verdict["ready"]:
                _say(f"imports of the last workers are learned, {verdict['seconds']:.1f} s of each start")
                return True
            if verdict["why"]:
                _say(f"imports of the last workers are not learned: {verdict['why']}")
        self._student = None
        said.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not answer:
            _say(f"imports of the last workers are not learned: the process that tried ended with {code}")
        return False

    def promote_candidate(self) -> None:
        """Let the student serve, and end when it does: the agent knows this process."""
        assert self._student is not None  # noqa: S101
        pid, told = self._student
        told.send(b"go")
        os.waitpid(pid, 0)
        os._exit(0)


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)

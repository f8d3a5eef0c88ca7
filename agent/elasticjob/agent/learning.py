"""Imports learned from the first workers, so that later ones need not repeat them.

A script that imports much more than is preloaded (transformers, say) would spend those seconds at each of its starts.
So a worker tells once, after its first step, what it has imported and the warm process has not. A process forked from
the warm process, the student, imports the libraries among that beside the training, at a fraction of a processor. Where
it may be trusted and saves something, it takes the place of the warm process; else it ends, and nothing has changed.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob.agent import trial

WORTH = 0.3
"""CPU seconds of imports from which on they are worth a second process."""
DEADLINE = 600
"""Seconds that a student may take."""
WORK, REST = 0.01, 0.03
"""Seconds: it sleeps so long after so much work. A lower priority could not be given back by the workers."""
_READ_BY_LIBRARIES = ("ARROW_", "BLIS_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "TF_", "XLA_")
"""Variables that native code reads as it is loaded, where nobody sees it."""
_STANDARD_LIBRARY = os.path.dirname(os.path.realpath(os.__file__)) + os.sep  # noqa: PTH120
_SITES = frozenset({"site-packages", "dist-packages"})


class Birth(NamedTuple):
    """What every worker begins with."""

    modules: frozenset[str]
    environment: dict[str, str]


class Report(NamedTuple):
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


def tell_at_first_step(channel: int, birth: Birth) -> None:
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


def _report(birth: Birth, before: dict[str, str]) -> Report:
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
    return Report(modules, package, directory, _changes(birth.environment, now), [*_changes(before, now)])


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    return {n: after.get(n) for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)}


# ---- in the warm process -----------------------------------------------------------------------------------------


class Learning:
    """Where workers report, until one has; then the student."""

    def __init__(self, birth: Birth) -> None:
        self.birth = birth
        self.wanted = True
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

    def hear(self, channel: socket.socket) -> Report | None:
        """What a worker says; None: it has ended, or this is no worker."""
        if channel not in self._channels:
            return None
        with suppress(OSError, ValueError, TypeError, zlib.error):
            report = Report(*json.loads(zlib.decompress(channel.recv(1 << 20))))
            self.close()
            return report
        self._channels.remove(channel)
        channel.close()
        return None

    def close(self) -> None:
        """Want no reports any more."""
        self.wanted = False
        for channel in self._channels:
            channel.close()
        self._channels = []

    def fork_student(self) -> socket.socket | None:
        """In the student: its way to say what became of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            return theirs
        theirs.close()
        self._student = pid, ours
        return None

    def graduated(self, said: socket.socket) -> bool:
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

    def hand_over(self) -> None:
        """Let the student serve, and end when it does: the agent knows this process."""
        assert self._student is not None  # noqa: S101
        pid, told = self._student
        told.send(b"go")
        os.waitpid(pid, 0)
        os._exit(0)


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


# ---- in the student ----------------------------------------------------------------------------------------------


def study(report: Report, birth: Birth) -> dict[str, Any]:
    """Import what was reported: `{"ready": true, "seconds": 4.5}` or `{"ready": false, "why": "..."}`."""
    signal.alarm(DEADLINE)
    files, started = _descriptors(), time.process_time()
    read: set[str] = set()
    importlib.invalidate_caches()
    with trial.import_environment(), _resting(), _watched_environment(read):
        why = _import([(name, file) for name, file in report.modules if _is_library(name, file, report)])
    seconds = time.process_time() - started
    if not why and seconds < WORTH:
        return {"ready": False, "why": ""}
    why = why or _odd_modules(birth) or _odd_variables(report, read) or _left_behind(files)
    verdict = {"ready": False, "why": why} if why else trial.threads() or trial.trial()
    signal.alarm(0)
    return verdict | {"seconds": round(seconds, 3)}


def _import(modules: list[tuple[str, str]]) -> str:
    for name, file in modules:
        try:
            module = importlib.import_module(name)
        except BaseException as error:
            return f"importing {name} raised {type(error).__name__}: {error}"[:1000]
        if getattr(module.__spec__, "origin", None) != file:
            return f"{name} is not {file}"
    return ""


def _is_library(name: str, file: str, report: Report) -> bool:
    directory = os.path.dirname(file)  # noqa: PTH120
    package = name.partition(".")[0]
    return _of_library(directory) and package not in (report.package, "elasticjob") and directory != report.directory


@functools.cache
def _of_library(directory: str) -> bool:
    directory = os.path.realpath(directory) + os.sep
    return directory.startswith(_STANDARD_LIBRARY) or not _SITES.isdisjoint(Path(directory).parts)


def _odd_modules(birth: Birth) -> str:
    """Code that a user may change must be read afresh by every worker, also where a library imports it."""
    for name in sys.modules.keys() - birth.modules:
        if name.partition(".")[0] == "elasticjob":
            continue  # torch asks for what it may be given as a rendezvous
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.has_location and not _of_library(os.path.dirname(spec.origin)):  # noqa: PTH120
            return f"a library imports {name} of {spec.origin}"
    return ""


def _odd_variables(report: Report, read: set[str]) -> str:
    """What a module reads as it is imported must be what it has read in the worker, and will read in others."""
    differ = {name for name, value in report.environment.items() if os.environ.get(name) != value}
    if seen := sorted(differ & read):
        return f"they read {', '.join(seen)}, which workers set"
    unseen = [name for name in report.own if name in differ and name.startswith(_READ_BY_LIBRARIES)]
    return f"the script sets {', '.join(unseen)}" if unseen else ""


def _left_behind(files: list[str]) -> str:
    """Open files would be shared by all workers; and of a device, be of no use after a fork."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "importing them started a process"
    return "importing them left files open" if _descriptors() != files else ""


def _descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208


@contextmanager
def _resting() -> Iterator[None]:
    """Leave most of a processor to the training."""
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(REST))
    signal.setitimer(signal.ITIMER_PROF, WORK, WORK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _watched_environment(read: set[str]) -> Iterator[None]:
    """Collect the names of the variables that are read."""
    environ: Any = os.environ
    plain = type(environ)

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return str(super().__getitem__(name))

    environ.__class__ = Watched
    try:
        yield
    finally:
        environ.__class__ = plain

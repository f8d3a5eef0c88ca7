"""In the student of the warm process: import what a worker has reported, and find out whether forks may have it."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elasticjob.agent.start_workers.fork_server import self_test
from elasticjob.agent.start_workers.fork_server.preload_learning import Baseline, ImportReport

MIN_CPU_SECONDS = 0.3
"""CPU seconds of imports from which on they are worth a second process."""
DEADLINE = 600
"""Seconds that a student may take."""
WORK_SECONDS, REST_SECONDS = 0.01, 0.03
"""Seconds: it sleeps so long after so much work. A lower priority could not be given back by the workers."""
_READ_BY_LIBRARIES = ("ARROW_", "BLIS_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "TF_", "XLA_")
"""Variables that native code reads as it is loaded, where nobody sees it."""
_STANDARD_LIBRARY = os.path.dirname(os.path.realpath(os.__file__)) + os.sep  # noqa: PTH120
_SITES = frozenset({"site-packages", "dist-packages"})


def import_reported(report: ImportReport, birth: Baseline) -> dict[str, Any]:
    """Import what was reported: `{"ready": true, "seconds": 4.5}` or `{"ready": false, "why": "..."}`."""
    signal.alarm(DEADLINE)
    files, started = _descriptors(), time.process_time()
    read: set[str] = set()
    importlib.invalidate_caches()
    with self_test.import_environment(), _resting(), _watched_environment(read):
        why = _import([(name, file) for name, file in report.modules if _is_library(name, file, report)])
    seconds = time.process_time() - started
    if not why and seconds < MIN_CPU_SECONDS:
        return {"ready": False, "why": ""}
    why = why or _odd_modules(birth) or _odd_variables(report, read) or _left_behind(files)
    verdict = {"ready": False, "why": why} if why else self_test.check_threads() or self_test.run_self_test()
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


def _is_library(name: str, file: str, report: ImportReport) -> bool:
    directory = os.path.dirname(file)  # noqa: PTH120
    package = name.partition(".")[0]
    return _of_library(directory) and package not in (report.package, "elasticjob") and directory != report.directory


@functools.cache
def _of_library(directory: str) -> bool:
    directory = os.path.realpath(directory) + os.sep
    return directory.startswith(_STANDARD_LIBRARY) or not _SITES.isdisjoint(Path(directory).parts)


def _odd_modules(birth: Baseline) -> str:
    """Code that a user may change must be read afresh by every worker, also where a library imports it."""
    for name in sys.modules.keys() - birth.modules:
        if name.partition(".")[0] == "elasticjob":
            continue  # torch asks for what it may be given as a rendezvous
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.has_location and not _of_library(os.path.dirname(spec.origin)):  # noqa: PTH120
            return f"a library imports {name} of {spec.origin}"
    return ""


def _odd_variables(report: ImportReport, read: set[str]) -> str:
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
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(REST_SECONDS))
    signal.setitimer(signal.ITIMER_PROF, WORK_SECONDS, WORK_SECONDS)
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

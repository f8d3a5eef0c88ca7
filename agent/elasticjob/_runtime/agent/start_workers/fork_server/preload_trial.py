"""In the candidate of preload learning: import the reported modules, and check that forks may have them."""

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

from elasticjob._runtime.agent.processes import open_files
from elasticjob._runtime.agent.start_workers.fork_server import self_test
from elasticjob._runtime.agent.start_workers.fork_server.early_variables import is_read_by_native_code, recorded_reads
from elasticjob._runtime.agent.start_workers.fork_server.gpu_count import count_gpus_in_forks
from elasticjob._runtime.agent.start_workers.fork_server.preload_learning import Baseline, ImportReport

MIN_CPU_SECONDS = 0.3
"""CPU seconds: imports that take less are not worth a second process."""
DEADLINE = 600
"""Seconds that a candidate may take; SIGALRM ends it then."""
WORK_SECONDS, REST_SECONDS = 0.01, 0.03
"""Seconds. The candidate sleeps after each span of work. A niceness would pass to the workers, which cannot undo it."""
_STANDARD_LIBRARY = os.path.dirname(os.path.realpath(os.__file__)) + os.sep  # noqa: PTH120
_SITES = frozenset({"site-packages", "dist-packages"})


def import_reported(report: ImportReport, baseline: Baseline, read: set[str]) -> dict[str, Any]:
    """Import the reported libraries and return the result.

    `{"ready": true, "seconds": 4.5}` (CPU seconds) or `{"ready": false, "reason": "..."}`; the reason is empty if the
    imports are not worth a second process. The names of the variables that the imports read are added to `read`.
    """
    signal.alarm(DEADLINE)
    files, started = _descriptors(), time.process_time()
    importlib.invalidate_caches()
    with (
        self_test.import_environment(),
        self_test.no_garbage_collections(),
        count_gpus_in_forks(),
        _yielding_processor(),
        recorded_reads(read),
    ):
        reason = _import([(name, file) for name, file in report.modules if _is_library(name, file, report)])
    seconds = time.process_time() - started
    if not reason and seconds < MIN_CPU_SECONDS:
        return {"ready": False, "reason": ""}
    reason = reason or _find_user_module(baseline) or _find_variable(report, read) or _find_leftover(files)
    failure = {"ready": False, "reason": reason} if reason else None
    result = failure or self_test.check_threads() or self_test.run_self_test()
    signal.alarm(0)
    return result | {"seconds": round(seconds, 3)}


def _import(modules: list[tuple[str, str]]) -> str:
    """Import (name, file) pairs. Return why this failed, else an empty text."""
    for name, file in modules:
        try:
            module = importlib.import_module(name)
        except BaseException as error:
            return f"importing {name} raised {type(error).__name__}: {error}"[:1000]
        if getattr(module.__spec__, "origin", None) != file:
            return f"importing {name} did not load {file}"
    return ""


def _is_library(name: str, file: str, report: ImportReport) -> bool:
    """Return whether a module belongs to a library and not to the worker's program."""
    directory = os.path.dirname(file)  # noqa: PTH120
    package = name.partition(".")[0]
    return _in_library(directory) and package not in (report.package, "elasticjob") and directory != report.directory


@functools.cache
def _in_library(directory: str) -> bool:
    """Return whether a directory belongs to the standard library or to site-packages."""
    directory = os.path.realpath(directory) + os.sep
    return directory.startswith(_STANDARD_LIBRARY) or not _SITES.isdisjoint(Path(directory).parts)


def _find_user_module(baseline: Baseline) -> str:
    """Return a reason if a library imported code that the user may change: every worker must read such code again."""
    for name in sys.modules.keys() - baseline.modules:
        if name.partition(".")[0] == "elasticjob":
            continue  # torch imports the rendezvous handlers of installed packages, elasticjob's too
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.has_location and not _in_library(os.path.dirname(spec.origin)):  # noqa: PTH120
            return f"a library imports {name}, which is not of a library: {spec.origin}"
    return ""


def _find_variable(report: ImportReport, read: set[str]) -> str:
    """Return a reason if an import read a variable whose value differs between this process and workers."""
    differ = {name for name, value in report.environment.items() if os.environ.get(name) != value}
    if seen := sorted(differ & read):
        return f"the imports read {', '.join(seen)}, whose values differ in workers"
    unseen = [name for name in report.set_by_program if name in differ and is_read_by_native_code(name, sys.modules)]
    return f"the script sets {', '.join(unseen)}, which libraries read when they are loaded" if unseen else ""


def _find_leftover(files: set[str]) -> str:
    """Return a reason if the imports left a process, a GPU or an open file.

    All workers would share an open file; an open device does not work after a fork.
    """
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "the imports started a process"
    if use := self_test.find_gpu_use():
        return f"the imports {use}"
    return "the imports left files open" if _descriptors() != files else ""


def _descriptors() -> set[str]:
    """Return the numbers of the open files, without what `nvmlInit` leaves open."""
    files = open_files(self_test.PROCESS)
    return {number for number, path in files.items() if path != self_test.NVML_DEVICE}


@contextmanager
def _yielding_processor() -> Iterator[None]:
    """Sleep most of the time, so that the training has the processor."""
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(REST_SECONDS))
    signal.setitimer(signal.ITIMER_PROF, WORK_SECONDS, WORK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

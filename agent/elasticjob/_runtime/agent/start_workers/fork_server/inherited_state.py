"""In a fork of the fork server: replace the state that a fork inherits but a new process does not have."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path


def set_process_title(argv: Sequence[str]) -> None:
    """Set the command line that `ps` shows, cut to the length of the process's first command line."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    room = end - start
    if room > 0:
        ctypes.memmove(
            start,
            b"\0".join(argument.encode(errors="replace") for argument in argv)[: room - 1].ljust(room, b"\0"),
            room,
        )


def reseed() -> None:
    """Seed the random generators again: all forks inherit the same states, and new processes have different ones."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # the CPU's; CUDA's has a fixed seed in a new process too
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.current_process().authkey = os.urandom(32)


def set_launch_directory() -> None:
    """Set the directory in which multiprocessing resolves the path of the main module."""
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]


def restore_threads() -> None:
    """Give OpenBLAS, imported with one thread, the number of threads that it has in a new process.

    Each thread (at most 63) spins for 20 ms when it starts. Therefore this runs ahead of need.
    """
    requested = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    processors = len(os.sched_getaffinity(0))
    count = min(int(requested), processors) if requested.isdigit() else processors
    if count <= 1:
        return
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_"):
            if (function := getattr(library, name, None)) is not None:
                function(ctypes.c_int(count))


def _loaded_libraries(part: str) -> set[str]:
    """Return the paths of loaded shared libraries whose mapping contains `part`."""
    with open("/proc/self/maps") as maps:
        paths = (line.rsplit(maxsplit=1)[-1] for line in maps if part in line)
        return {p for p in paths if p.startswith("/") and ".so" in p}

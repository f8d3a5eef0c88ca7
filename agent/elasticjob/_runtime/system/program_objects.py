"""Destroy the objects of the program as Python's finalization does, in an interpreter that still runs.

A gzip or zip file is complete only once its object is destroyed or closed. Python's finalization cannot be used for
this: it ends every thread that asks for the interpreter, and a thread of a process group does.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import sys
import sysconfig
import threading
import traceback
import types
from contextlib import suppress
from typing import Any

_SITES = frozenset({"site-packages", "dist-packages"})
_STANDARD_LIBRARY = tuple(f"{path}/" for p in [sysconfig.get_path("stdlib")] for path in (p, os.path.realpath(p)))
_finalize = ctypes.pythonapi.PyObject_CallFinalizer
_finalize.restype = None
_LAST_ERROR = ("last_exc", "last_type", "last_value", "last_traceback")


def destroy_program_objects() -> None:
    """Destroy what `__main__` and the program's other modules refer to; then close what libraries still refer to.

    The order is the same as in Python's finalization, which first removes all modules from sys.modules and collects
    garbage. So destructors still find the modules and names that they use. Libraries stay, because their destruction
    takes seconds with torch. Objects that only a library refers to, such as the stream of a logging handler, are
    closed, unless another thread uses them. Objects from before the fork (`gc.freeze`) do not belong to the program.
    """
    for name in _LAST_ERROR:
        if hasattr(sys, name):
            setattr(sys, name, None)
    for name in ("stdin", "stdout", "stderr"):
        _flush(getattr(sys, name, None))
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    # As Python does. The collector sorts objects: each one comes before the objects that it refers to. So a text file
    # in a cycle is closed before the compressed file below it.
    gc.collect()
    # Kept until the end, so that no other object gets the same id. The functions of threads may refer to them.
    names_of_modules = [vars(module) for module in [*sys.modules.values()] if isinstance(module, types.ModuleType)]
    for name in [*filter(_is_of_program, sys.modules)]:
        del sys.modules[name]
    gc.collect()
    _close_rest(frozenset(map(id, names_of_modules)))
    del names_of_modules
    gc.collect()
    flush_files()


def flush_files() -> None:
    """Flush what is still open: files of other threads, and those of native libraries."""
    for item in (sys.stdout, sys.stderr, *gc.get_objects()):  # objects since the fork: older ones are frozen
        if issubclass(type(item), io.IOBase):
            _flush(item)
    ctypes.CDLL(None).fflush(None)


def _is_of_program(name: str) -> bool:
    """Return whether a module is the program's: `__main__`, or neither a library nor this package."""
    if name in ("__main__", "__mp_main__"):
        return True
    file = None
    with suppress(Exception):  # the program may have put any object there
        file = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    if name.partition(".")[0] == "elasticjob" or not isinstance(file, str) or not os.path.isabs(file):  # noqa: PTH117
        return False
    return not (_in_library(file) or _in_library(os.path.realpath(file)))  # the second takes 30 us: there are thousands


def _in_library(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) or not _SITES.isdisjoint(file.split("/"))


def _close_rest(names_of_modules: frozenset[int]) -> None:
    """Close files, and run `__del__` of other objects, in the order of the garbage collector, as above."""
    kept = _standard_streams() | _used_by_other_threads(names_of_modules)
    for item in gc.get_objects():  # objects since the fork: older ones are frozen
        kind = type(item)
        if id(item) in kept or gc.is_finalized(item):
            continue
        try:
            if issubclass(kind, io.IOBase):
                item.close()
            elif isinstance(getattr(kind, "__del__", None), types.FunctionType):
                _finalize(ctypes.py_object(item))  # as the garbage collector does: it does not call it once more
        except Exception as error:
            _report(error, kind)


def _report(error: Exception, kind: type) -> None:
    """Show an error as Python shows one of a destructor."""
    with suppress(Exception):
        print(f"Exception ignored in: the end of a {kind.__qualname__}", file=sys.stderr)
        traceback.print_exception(error)


def _standard_streams() -> set[int]:
    """Return the ids of the standard streams and of the files below them."""
    found: set[int] = set()
    for name in ("__stdin__", "__stdout__", "__stderr__"):
        stream: Any = getattr(sys, name)
        while stream is not None:
            found.add(id(stream))
            stream = getattr(stream, "buffer", None) or getattr(stream, "raw", None)
    return found


def _used_by_other_threads(names_of_modules: frozenset[int]) -> set[int]:
    """Return the ids of the objects that the variables of other threads' functions refer to, directly or not.

    What they find by the names of a module does not count: Python destroys these too.
    """
    pending: list[Any] = []
    for thread, top in sys._current_frames().items():
        frame: types.FrameType | None = top if thread != threading.get_ident() else None
        while frame is not None:
            pending += frame.f_locals.values()
            frame = frame.f_back
    found: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in found or id(item) in names_of_modules or isinstance(item, (types.ModuleType, type)):
            continue
        found.add(id(item))
        if gc.is_tracked(item):  # the others refer to nothing that has to be closed, and may be millions
            pending += gc.get_referents(item)
    return found


def _flush(stream: Any) -> None:
    with suppress(Exception):
        stream.flush()

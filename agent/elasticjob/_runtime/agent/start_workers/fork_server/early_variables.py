"""In a worker: start again by exec if the script sets a variable that the preloaded modules have read already.

A script may set `TORCH_LOGS` or `OMP_NUM_THREADS` and import torch after that. In a fork torch has read them long ago,
so the setting would have no effect. Until the script imports a preloaded module, this watches what it sets.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

from elasticjob._runtime.contract.names import early_variable_file
from elasticjob._runtime.system.program_objects import flush_files

READ_BY_NATIVE_CODE = (
    *("BLIS_", "CUBLAS_LOG", "CUDA_MODULE_LOADING", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "GOTO_NUM_THREADS"),
    *("KINETO_USE_DAEMON", "KMP_", "LC_ALL", "LD_", "MALLOC_", "MKLDNN_", "MKL_", "NPY_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTORCH_ALLOC_CONF", "PYTORCH_API_USAGE_STDERR", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_", "TORCH_CPP_LOG_LEVEL", "TORCH_CUSTOM_TERMINATE"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_LINALG_PREFER_", "TORCH_ROCM_FA_PREFER_CK", "TORCH_SHOW_CPP_STACKTRACES"),
    "TORCH_SYMMMEM",
)
"""Prefixes of variables that native code reads when it is loaded; such reads bypass os.environ.

Source: the calls of `getenv` in `import torch, torch._dynamo, torch.distributed, numpy` (torch 2.15, LD_PRELOAD of a
library that records them)."""
READ_BY_LIBRARIES = {"ARROW_": ("pyarrow",), "TF_": ("tensorflow",), "XLA_": ("tensorflow", "jax", "torch_xla")}
"""The same for libraries that some jobs preload, by prefix: they count only if one of the libraries is loaded."""

_RUN_MAIN = str(Path(__file__).with_name("run_main.py"))


class ProcessStart(NamedTuple):
    """How this process would have been started by exec."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str


@dataclass
class PreloadRecord:
    """What the fork server has imported. Its forks read this in place.

    A fork that copies it, or walks through sys.modules, writes to the reference count of each name, and so copies the
    page of each: 734 pages and 2.4 ms for 1200 modules of torch.
    """

    read: set[str]
    """The variables that the modules have read."""
    modules: frozenset[str] = frozenset()
    """The names of all modules at the last `note_modules`."""

    def note_modules(self) -> None:
        """In the fork server, before it freezes its memory."""
        self.modules = frozenset(sys.modules)


@contextmanager
def recorded_reads(read: set[str]) -> Iterator[None]:
    """Add the names of the variables that are read from os.environ to `read`."""
    environ: Any = os.environ
    plain = type(environ)

    class Recorded(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return str(super().__getitem__(name))

    environ.__class__ = Recorded
    try:
        yield
    finally:
        environ.__class__ = plain


def watch_early_variables(record: PreloadRecord, preloaded: frozenset[str], start: ProcessStart) -> None:
    """Watch what the script assigns to os.environ, as long as it has not imported `preloaded` (top-level names)."""
    environ: Any = os.environ
    plain, process, read = type(environ), os.getpid(), record.read
    late = islice(reversed(sys.modules), max(0, len(sys.modules) - len(record.modules)))  # imported since the fork
    modules = _Either(record.modules, frozenset(late))

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __setitem__(self, name: str, value: str) -> None:
            if os.environ.get(name) != value:
                changed(name)
            plain.__setitem__(self, name, value)  # `changed` may have ended this class

        def __delitem__(self, name: str) -> None:
            if name in os.environ:
                changed(name)
            plain.__delitem__(self, name)

    def changed(name: str) -> None:
        if name not in read and not (isinstance(name, str) and is_read_by_native_code(name, modules)):
            return
        environ.__class__ = plain
        if os.getpid() == process and not _has_imported(preloaded, modules):
            _start_again(name, start)

    Watched.__name__, Watched.__qualname__ = plain.__name__, plain.__qualname__
    environ.__class__ = Watched


@dataclass
class _Either:
    """The union of two sets that are not copied."""

    first: frozenset[str]
    second: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.first or name in self.second


def is_read_by_native_code(name: str, modules: Container[str]) -> bool:
    """Return whether native code reads a variable when it is loaded. `modules`: the names of those that are loaded."""
    libraries = (found for prefix, found in READ_BY_LIBRARIES.items() if name.startswith(prefix))
    return name.startswith(READ_BY_NATIVE_CODE) or any(library in modules for found in libraries for library in found)


def _has_imported(preloaded: frozenset[str], modules: Container[str]) -> bool:
    """Return whether the script or a module that it has imported refers to something of a preloaded module.

    An import hook would see it earlier, but tracers and profilers would see the hook. `modules`: names of the modules
    of the fork server.
    """
    found = [module for name, module in [*sys.modules.items()] if name not in modules or name == "__main__"]
    names = [{**getattr(module, "__dict__", {})} for module in found]
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _RUN_MAIN:  # below are frames of the fork server
        if frame.f_code.co_filename != __file__:
            names.append({**frame.f_locals})
        frame = frame.f_back
    return any(_is_of(preloaded, value) for each in names for value in each.values())


def _is_of(preloaded: frozenset[str], value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in preloaded
    defined = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    module = defined.__module__
    return isinstance(module, str) and module.partition(".")[0] in preloaded


def _start_again(name: str, start: ProcessStart) -> None:
    """Replace this process by one that runs the script from its beginning; say why it cannot, if so."""
    reason = f"the script sets {name} before it imports what is preloaded, and the preload has read it"
    if error_file := start.environment.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(early_variable_file(error_file)).write_text(reason, encoding="utf-8", errors="replace")
    if obstacle := _obstacle():
        _say(f"{reason}: it has no effect in this process, which {obstacle}; the next ones start by exec")
        return
    _say(f"{reason}: this process starts again by exec, and the next ones start so at once")
    _execute(start)


def _obstacle() -> str:
    """Return why this process cannot start again; empty if it can. A new start repeats what the script has done."""
    if threading.active_count() > 1:
        return "has started threads"
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "has started processes"
    return ""


def _execute(start: ProcessStart) -> NoReturn:
    flush_files()
    os.chdir(start.directory)
    os.execvpe(start.argv[0], [*start.argv], dict(start.environment))  # noqa: S606


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(f"elasticjob: {text}\n")
        sys.stderr.flush()

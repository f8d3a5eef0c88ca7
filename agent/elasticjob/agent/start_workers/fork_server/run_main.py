"""In a worker forked from the warm process: become what `python script.py` would be, then run it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from elasticjob.agent.start_workers.without_libuv import sitecustomize

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Program(NamedTuple):
    """A Python command line: `target` is a file, a module or source text as `mode` says."""

    mode: str
    """`script`, `module` or `code`."""
    target: str
    args: tuple[str, ...]
    argv: tuple[str, ...]
    """The whole command line, for sys.orig_argv."""


class CallerProcess(NamedTuple):
    """A process of another, that a worker takes the place of."""

    command: dict[str, Any]
    """Fields of `Command`."""
    executable: str
    env: dict[str, str]
    directory: str
    umask: int
    ignored: list[int]
    """Signals."""
    limits: list[tuple[int, int, int]]
    """(resource, soft, hard)."""
    unbuffered: bool


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the end of this process's parent (Linux)."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def show_command(words: Sequence[str]) -> None:
    """What `ps` shows of this process; cut to the room that its own command line had."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    room = end - start
    if room > 0:
        ctypes.memmove(
            start, b"\0".join(word.encode(errors="replace") for word in words)[: room - 1].ljust(room, b"\0"), room
        )


def prepare_fork() -> None:
    """All that need not wait for what the worker will be; after this the process forks no other worker.

    A fork's first look at a page costs a fault, so what `run` repeats it finds quicker.
    """
    show_command(["elasticjob-reserve"])
    _restore_threads()
    _draw_afresh()
    importlib.invalidate_caches()


def run_program(command: Program) -> None:
    """Run the user's program as `__main__`; ends as Python would (returns, SystemExit(0), or a signal).

    In a process that has called `prepare`. Where the program fails, the process ends here, at once.
    """
    show_command(command.argv)
    _do_without_libuv()
    _report_steps()
    _forget_launch_directory()
    importlib.invalidate_caches()  # directories of sys.path may have come since
    atexit.register(gc.unfreeze)  # shared until the end, collected at the end like anything else
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if hasattr(sys.modules["__main__"], "__annotations__"):  # not so from Python 3.14 on
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.orig_argv[:] = command.argv
    try:
        _execute(command, main)
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        end_at_once(end.code & 0xFF if isinstance(end.code, int) else 1)
    except BaseException as error:
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        end_at_once(1)


def take_place_of(place: CallerProcess) -> Program:
    """Be in the directory, with the environment, limits and streams, that a new process there would have."""
    command = Program(**place.command)
    os.chdir(place.directory)
    os.umask(place.umask)
    for number, soft, hard in place.limits:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (soft, hard))
    for number in place.ignored:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(place.env)
    sys.executable = place.executable
    if not keeps_path():
        sys.path.insert(0, "")
    prepare_path(command)
    _open_streams(place.unbuffered)
    return command


def _open_streams(unbuffered: bool) -> None:
    """As Python does at its start; those of this process were opened on other files."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before, direct = getattr(sys, name), unbuffered and mode == "w"
        stream: Any = None
        with contextlib.suppress(OSError):  # closed
            file: Any = open(number, f"{mode}b", 0 if direct else -1, closefd=False)  # noqa: SIM115
            (file if direct else file.raw).name = f"<{name}>"
            lines = not direct and (number == 2 or file.isatty())
            stream = io.TextIOWrapper(file, before.encoding, before.errors, "\n", lines, direct)
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _report_steps() -> None:
    """Where somebody looks for hangs, every step of an optimizer is a sign of life."""
    optimizer = sys.modules.get("torch.optim.optimizer")
    if optimizer is None or "ELASTICJOB_STACK_DUMP_FILE" not in os.environ:
        return
    with contextlib.suppress(ImportError):  # the user's code may have its own `elasticjob`
        from elasticjob.training.progress_channel import heartbeat

        optimizer.register_optimizer_step_post_hook(lambda *_: heartbeat())


def _do_without_libuv() -> None:
    """The agent found that this torch has none: see `without_libuv`."""
    if os.environ.get("USE_LIBUV") == "0":
        sitecustomize.install()


def keeps_path() -> bool:
    """Whether Python puts nothing of the command on sys.path."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def prepare_path(command: Program) -> None:
    """Make sys.path[0] what Python would make it; `python -c`, as this process was started, put the empty string."""
    if keeps_path():
        return
    match command.mode:
        case "module":
            sys.path[0] = str(Path.cwd())
        case "script":
            sys.path[0] = os.path.dirname(os.path.realpath(command.target))  # noqa: PTH120
        case _:
            pass


def _execute(command: Program, main: types.ModuleType) -> None:
    match command.mode:
        case "module":
            import runpy

            sys.argv[:] = ["-m", *command.args]
            runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]
        case "code":
            sys.argv[:] = ["-c", *command.args]
            main.__dict__.update(__spec__=None, __loader__=importlib.machinery.BuiltinImporter)
            _show_source(command.target)
            exec(compile(command.target, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        case _:
            sys.argv[:] = [command.target, *command.args]
            _run_script(command.target, main)


def _show_source(text: str) -> None:
    """From Python 3.13 on tracebacks show the lines of `-c`; this process had another `-c`."""
    if "<string>" in linecache.cache:
        linecache.cache["<string>"] = (len(text), None, [f"{line}\n" for line in text.splitlines()], "<string>")


def _run_script(path: str, main: types.ModuleType) -> None:
    absolute = os.path.join(Path.cwd(), path)  # noqa: PTH118  (not normalized, as Python leaves it)
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    main.__dict__.update(__file__=absolute, __cached__=None, __loader__=loader, __spec__=None)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.orig_argv[0]}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
        )
        sys.exit(2)
    exec(compile(source, absolute, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


# ---- what a fork inherits and a new process would not --------------------------------------------------------------


def _draw_afresh() -> None:
    """New entropy: every fork has the same random state, new processes all have different ones."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # the CPU's; CUDA's has a fixed seed in a new process too
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.current_process().authkey = os.urandom(32)


def _forget_launch_directory() -> None:
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]


def _restore_threads() -> None:
    """OpenBLAS was imported with one thread; give it what a new process would have.

    Its threads, at most 63, spin for 20 ms of the processor when they start: the reason to do it ahead of need.
    """
    asked = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    processors = len(os.sched_getaffinity(0))
    count = min(int(asked), processors) if asked.isdigit() else processors
    if count <= 1:
        return
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_"):
            if (function := getattr(library, name, None)) is not None:
                function(ctypes.c_int(count))


def _loaded_libraries(part: str) -> set[str]:
    with open("/proc/self/maps") as maps:
        paths = (line.rsplit(maxsplit=1)[-1] for line in maps if part in line)
        return {p for p in paths if p.startswith("/") and ".so" in p}


# ---- ends --------------------------------------------------------------------------------------------------------


def _report(error: BaseException) -> None:
    """Print the traceback without our own frames, and leave it in torchrun's error file unless `@record` did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    _write_error_file(error)
    sys.excepthook(type(error), error, trace)


def _write_error_file(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):  # noqa: PTH110
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    data: dict[str, Any] = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w") as file:
            json.dump(data, file)
    except OSError as cause:
        print(f"cannot write {path}: {cause}", file=sys.stderr)


def end_at_once(status: int) -> NoReturn:
    """Leave without taking Python apart, which takes a fork 1.3 CPU seconds with torch: somebody waits to recover.

    What that would write is written: threads end, atexit functions run, files that the program left open are flushed.
    Destructors do not run, nor what libraries do at the end of a process.
    """
    _clean_up()
    os._exit(status)


def _end_by_interrupt() -> None:
    """Python ends by the signal itself, after its clean-up, so that the parent sees it."""
    _clean_up()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _clean_up() -> None:
    """What Python does at its end before it takes itself apart."""
    atexit.unregister(gc.unfreeze)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for thing in (sys.stdout, sys.stderr, *gc.get_objects()):  # since the fork: what was there before is frozen
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()

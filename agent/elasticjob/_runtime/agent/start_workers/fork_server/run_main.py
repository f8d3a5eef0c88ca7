"""In a fork of the fork server: take on the state that `python script.py` has at its start, then run the script."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import linecache
import os
import resource
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob._runtime.agent.start_workers.fork_server import early_variables, inherited_state
from elasticjob._runtime.agent.start_workers.in_workers import sitecustomize
from elasticjob._runtime.agent.start_workers.in_workers.error_file import record_exception
from elasticjob._runtime.contract.names import Env, RoundId, script_returned_file, success_recorded_file
from elasticjob._runtime.system.process_end import clean_up, end_at_once


class Program(NamedTuple):
    """A Python command line. `mode` determines whether `target` is a file, a module or source text."""

    mode: str
    """`script`, `module` or `code`."""
    target: str
    args: tuple[str, ...]
    argv: tuple[str, ...]
    """The whole command line, for sys.orig_argv."""


class CallerProcess(NamedTuple):
    """A process that runs a shim, whose place the fork takes."""

    command: dict[str, Any]
    """Fields of `Program`."""
    executable: str
    env: dict[str, str]
    directory: str
    umask: int
    ignored: list[int]
    """Signal numbers."""
    limits: list[tuple[int, int, int]]
    """(resource, soft, hard)."""
    unbuffered: bool
    """Whether Python runs with `-u` or PYTHONUNBUFFERED."""


def prepare_fork() -> None:
    """Do the work that does not depend on the request, in a pre-forked process, ahead of need.

    `run_program` repeats parts of it, which is quicker then: a fork's first access to a page costs a page fault.
    """
    inherited_state.set_process_title(["elasticjob-preforked"])
    inherited_state.restore_threads()
    inherited_state.reseed()
    importlib.invalidate_caches()


def run_program(
    command: Program,
    record: early_variables.PreloadRecord | None = None,
    preloaded: frozenset[str] = frozenset(),
) -> None:
    """Run the user's program as `__main__`, in a process that has called `prepare_fork`.

    `record` and `preloaded`: see `early_variables.watch_early_variables`; None: nothing is watched.

    On success this returns or raises SystemExit as the program does. This ends the process if the program fails, or
    succeeds and leaves a process group.
    """
    inherited_state.set_process_title(command.argv)
    _patch_torch()
    _report_heartbeats()
    _enable_stack_dumps()
    inherited_state.set_launch_directory()
    importlib.invalidate_caches()  # directories of sys.path may have been created since
    atexit.register(gc.unfreeze)  # frozen objects are shared with the fork server; Python collects them at its end
    script = _Script(os.getpid())
    atexit.register(script.record_success)  # it runs after the functions that the program registers
    sys.orig_argv[:] = command.argv
    if preloaded and record is not None:
        early_variables.watch_early_variables(record, preloaded, _start_by_exec(command))
    end = _run_to_end(command)  # its frames are gone now, so that nothing but sys.modules refers to the program
    if end.interrupted:
        _end_by_interrupt()
    if end.status != 0:
        end_at_once(end.status)
    script.succeed()
    if end.by_exit:
        raise SystemExit(0)


def _start_by_exec(command: Program) -> early_variables.ProcessStart:
    """Return how this process would run the command without a fork server."""
    return early_variables.ProcessStart([sys.executable, *command.argv[1:]], dict(os.environ), str(Path.cwd()))


class _End(NamedTuple):
    """How the program has ended."""

    status: int
    by_exit: bool = False
    """Whether it has raised SystemExit."""
    interrupted: bool = False


def _run_to_end(command: Program) -> _End:
    """Run the program in a new module `__main__`, and report its exception."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins  # the module; in other modules `__builtins__` is its dict
    if hasattr(sys.modules["__main__"], "__annotations__"):  # up to Python 3.13
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        _execute(command, main)
    except SystemExit as end:
        if end.code in (None, 0):
            return _End(0, by_exit=True)
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return _End(end.code & 0xFF if isinstance(end.code, int) else 1, by_exit=True)
    except BaseException as error:
        _report_exception(error)
        return _End(1, interrupted=isinstance(error, KeyboardInterrupt))
    return _End(0)


def take_place_of(caller: CallerProcess) -> Program:
    """Take over the caller's directory, environment, limits, signals and streams. Return the program to run."""
    command = Program(**caller.command)
    os.chdir(caller.directory)
    os.umask(caller.umask)
    for number, soft, hard in caller.limits:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (soft, hard))
    for number in caller.ignored:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(caller.env)
    sys.executable = caller.executable
    if not is_safe_path():
        sys.path.insert(0, "")
    prepare_path(command)
    _open_streams(caller.unbuffered)
    return command


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as Python does at its start: this process's own were opened on other files."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before, direct = getattr(sys, name), unbuffered and mode == "w"
        stream: Any = None
        with contextlib.suppress(OSError):  # the descriptor is closed
            file: Any = open(number, f"{mode}b", 0 if direct else -1, closefd=False)  # noqa: SIM115
            (file if direct else file.raw).name = f"<{name}>"
            lines = not direct and (number == 2 or file.isatty())
            stream = io.TextIOWrapper(file, before.encoding, before.errors, "\n", lines, direct)
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _report_heartbeats() -> None:
    """Report each optimizer step as a heartbeat, if the agent monitors hangs."""
    optimizer = sys.modules.get("torch.optim.optimizer")
    if optimizer is None or Env.DETECT_HANGS not in os.environ:
        return
    with contextlib.suppress(ImportError):  # the user's code may have its own `elasticjob`
        from elasticjob.training.progress_channel import heartbeat

        optimizer.register_optimizer_step_post_hook(lambda *_: heartbeat())


def _enable_stack_dumps() -> None:
    """Let the agent ask what a script waits for: one that runs ahead of its round and does not get to its function, or
    one that hangs and reports no steps itself (`spec.logRules`)."""
    round_id = os.environ.get(Env.ROUND, "")
    with contextlib.suppress(ImportError, ValueError):  # the user's code may have its own `elasticjob`
        if Env.DETECT_HANGS in os.environ or RoundId.parse(round_id).is_prestarted:
            from elasticjob.training.progress_channel import enable_stack_dumps

            enable_stack_dumps()


def _patch_torch() -> None:
    """Patch torch as `sitecustomize` does in a worker that starts by exec."""
    if Env.WORLD in os.environ or os.environ.get("USE_LIBUV") == "0":
        sitecustomize.install()


def is_safe_path() -> bool:
    """Return whether Python adds no entry for the command to sys.path (`-I`, `-P`)."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def prepare_path(command: Program) -> None:
    """Set sys.path[0] as Python does for the command. This process was started by `-c`: its entry is empty."""
    if is_safe_path():
        return
    match command.mode:
        case "module":
            sys.path[0] = str(Path.cwd())
        case "script":
            sys.path[0] = os.path.dirname(os.path.realpath(command.target))  # noqa: PTH120
        case _:
            pass


def _execute(command: Program, main: types.ModuleType) -> None:
    """Execute the program in the module `main`, with sys.argv as Python sets it."""
    match command.mode:
        case "module":
            import runpy

            sys.argv[:] = ["-m", *command.args]
            runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]
        case "code":
            sys.argv[:] = ["-c", *command.args]
            main.__dict__.update(__spec__=None, __loader__=importlib.machinery.BuiltinImporter)
            _cache_source(command.target)
            exec(compile(command.target, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        case _:
            sys.argv[:] = [command.target, *command.args]
            _run_script(command.target, main)


def _cache_source(text: str) -> None:
    """Replace the source that tracebacks show for `-c` from Python 3.13 on: it is the fork server's own `-c`."""
    if "<string>" in linecache.cache:
        linecache.cache["<string>"] = (len(text), None, [f"{line}\n" for line in text.splitlines()], "<string>")


def _run_script(path: str, main: types.ModuleType) -> None:
    absolute = os.path.join(Path.cwd(), path)  # noqa: PTH118  (not normalized: Python does not normalize it either)
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


# ---- end of the process --------------------------------------------------------------------------------------------


def _report_exception(error: BaseException) -> None:
    """Print the traceback without this module's frames, and write torchrun's error file unless `@record` has."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        record_exception(path, error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # atexit functions may look
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)


class _Script:
    """Whether the program has succeeded, and the end of its process if so."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        """The process that runs the program; its children may run its atexit functions too."""
        self._succeeded = False

    def succeed(self) -> None:
        """Note that the program has succeeded; end the process at once if the program left a process group.

        Python's finalization ends threads that ask for the interpreter. A thread of a process group does so to release
        a tensor, and C++ ends the process by SIGABRT then ("terminate called without an active exception").
        """
        self._succeeded = os.getpid() == self._pid
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self._succeeded:  # the agent may end this process before Python's finalization has
            with contextlib.suppress(OSError), open(script_returned_file(path), "w") as file:
                file.write(f"{self._pid} {time.time()}")
        if self._succeeded and _has_process_group():
            end_at_once(0)

    def record_success(self) -> None:
        """Tell the agent, if the program has succeeded, that a signal from now on is not a failure of the program."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self._succeeded and os.getpid() == self._pid:
            with contextlib.suppress(OSError), open(success_recorded_file(path), "w") as file:
                file.write(str(os.getpid()))


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _end_by_interrupt() -> None:
    """Clean up, then end by SIGINT itself as Python does, so that the parent sees the signal."""
    clean_up()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)

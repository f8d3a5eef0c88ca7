"""Forked workers behave as workers started by `python`: the tests run the same programs both ways."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elasticjob._runtime.agent.processes import become_subreaper, descendants, signal_group
from elasticjob._runtime.agent.start_workers import fork_server_supervisor
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart
from elasticjob._runtime.agent.start_workers.worker_environment import worker_env
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import RoundId

pytestmark = pytest.mark.usefixtures("own_threads")

PRELOAD = ("json", "random", "multiprocessing")


@asynccontextmanager
async def forking_launcher(
    argv: Sequence[str], folder: Path, preload: Sequence[str] = PRELOAD, workers: int = 1
) -> AsyncIterator[Launcher]:
    """Prepare a launcher whose workers are forks."""
    become_subreaper()
    with (folder / "fork_server.log").open("wb") as log:
        launcher = Launcher(parse_command(argv), {**os.environ, "BASE": "1"}, preload, log.fileno(), workers)
        message = await launcher.prepare()
        assert message.startswith("fork server ready after"), (message, (folder / "fork_server.log").read_text())
        fork_server = launcher.fork_server_pid
        assert fork_server is not None
        try:
            yield launcher
        finally:
            launcher.stop_fork_server()
            await asyncio.to_thread(os.waitpid, fork_server, 0)


async def run_workers(launcher: Launcher, folder: Path) -> list[tuple[int, str, str]]:
    """Start the workers and return (exit code, stdout, stderr) of each."""
    names = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(launcher.workers)]
    files = [(out.open("wb"), err.open("wb")) for out, err in names]
    env = {"WORKER": "yes", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    pids = await launcher.start([WorkerStart(env, out.fileno(), err.fileno()) for out, err in files])
    codes = [os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) for pid in pids]
    for pair in files:
        for file in pair:
            file.close()
    return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, names, strict=True)]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def run_both_ways(argv: Sequence[str], folder: Path, preload: Sequence[str] = PRELOAD) -> tuple[object, object]:
    """Run a program as a fork and by exec. Return (exit code, stdout, stderr) of both."""
    async with forking_launcher(argv, folder, preload) as launcher:
        forked = (await run_workers(launcher, folder))[0]
    env = {**os.environ, "BASE": "1", "WORKER": "yes", "TORCHELASTIC_ERROR_FILE": str(folder / "other.json")}
    plain = await asyncio.to_thread(
        subprocess.run, argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return forked, (plain.returncode, plain.stdout, plain.stderr)


LEFT_OPEN = "import os, sys\nfile = os.fdopen(os.dup(2), 'w')\nfile.write('left open')\nprint('x')\n"

PROGRAMS = {
    "arguments and paths": "import sys; print(sys.argv, sys.path[0], sys.orig_argv, sys.executable, sys.flags)",
    "main module": """
import __main__, inspect, sys
print(__name__, __file__, __spec__, __cached__, __package__, type(__loader__).__name__)
print(__main__ is sys.modules[__name__])
print(sorted(vars()), type(__builtins__), __builtins__.len)
def f(): pass
print(inspect.getsource(f), inspect.getfile(f))
""",
    "annotations are not postponed": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "environment": "import os; print(os.environ['BASE'], os.environ['WORKER'], 'OPENBLAS_NUM_THREADS' in os.environ)",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('message')",
    "no exit code": "raise SystemExit",
    "exception": "def f():\n    raise ValueError('bad')\nf()",
    "chained exception": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e",
    "syntax error": "def f(:\n    pass",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\nraise ValueError('bad')",
    "atexit and unflushed output": "import atexit\natexit.register(print, 'bye')\nprint('x')",
    "atexit and a file left open, without an exception": LEFT_OPEN + "import atexit\natexit.register(print, 'bye')",
    "atexit after an exception": "import atexit\natexit.register(print, 'bye')\nraise ValueError",
    "output and a file left open, after an exception": LEFT_OPEN + "raise ValueError",
    "output and a file left open, and an exit code": LEFT_OPEN + "sys.exit(3)",
    "output and a file left open, and an interrupt": LEFT_OPEN + "os.kill(os.getpid(), 2)",
    "threads end first after an exception": "import threading, time\n"
    "threading.Thread(target=lambda: (threading.main_thread().join(), print('late'))).start()\nraise ValueError",
    "threads end first": """
import threading, time
threading.Thread(target=lambda: (threading.main_thread().join(), print("late"))).start()
""",
    "interrupt": "import os, signal, atexit\natexit.register(print, 'bye')\nos.kill(os.getpid(), signal.SIGINT)",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "signal handlers": "import signal\nprint([str(signal.getsignal(s))[:40] for s in sorted(signal.valid_signals())])",
    "signal mask": "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "stdin": "import sys; print(repr(sys.stdin.read()), sys.stdin.isatty())",
    "output": "import sys\nprint([(s.line_buffering, s.write_through, s.errors) for s in (sys.stdout, sys.stderr)])",
    "descriptors": "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3], os.fstat(0).st_rdev)",
    "stack depth": "import traceback\ntraceback.print_stack(limit=1)",
    "multiprocessing": """
import multiprocessing as mp, sys
def work(x): return x * 2
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [1, 2]))
""",
    "pickle of a class in main": """
import pickle
class A: pass
print(type(pickle.loads(pickle.dumps(A()))).__module__)
""",
    "crash": "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nctypes.string_at(0)",
    "core dumps": """
import ctypes, resource
print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3), open("/proc/self/coredump_filter").read())
""",
    "resource limits": """
import resource
print({name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")})
""",
    "settings of the interpreter": """
import gc, os, sys, threading
print(sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled(), sys.warnoptions)
print(threading.active_count(), threading.current_thread() is threading.main_thread(), os.umask(0))
print(sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__)
""",
    "a subprocess of the same interpreter": """
import subprocess, sys
print(subprocess.check_output([sys.executable, "-c", "import sys; print(sys.argv, sys.flags)"], text=True))
""",
    "a debugger": "import sys\nprint('before', flush=True)\nbreakpoint()\nprint('after')",
    "a tracer": """
import sys
def f(x):
    return x
seen = []
sys.settrace(lambda frame, event, arg: seen.append((event, frame.f_code.co_name)))
f(1)
sys.settrace(None)
print(seen)
""",
    "dataclass in main": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nprint(A())",
}


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_a_script(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    forked, plain = await run_both_ways([sys.executable, str(path), "--lr", "1"], tmp_path)
    assert forked == plain


MODULE_LINES = {
    "a module": ["-m", "pkg.train", "a"],
    "relative imports": ["-m", "pkg.relative"],
    "a debugger": ["-m", "pdb", "-c", "continue", "pkg/train.py", "a"],
    "a profiler": ["-m", "cProfile", "-o", "/dev/null", "-m", "pkg.train", "a"],
    "coverage of the standard library": ["-m", "trace", "--listfuncs", "pkg/train.py", "a"],
    "a package": ["-m", "pkg", "a"],
    "no such module": ["-m", "pkg.nothing"],
    "code": ["-c", "import sys; print(sys.argv, sys.path[0], sorted(vars()), __name__)", "a"],
    "unbuffered": ["-u", "-c", "import sys; print(sys.stdout.write_through, sys.flags)"],
    "optimized": ["-O", "-c", "assert False; print(sys.flags) if 0 else print(__debug__)"],
    "warnings are errors": ["-W", "error", "-c", "import warnings; warnings.warn('x')"],
    "isolated": ["-I", "-c", "import sys; print(sys.path, sys.flags)"],
    "relative script": ["pkg/train.py", "a"],
    "no such file": ["nothing.py"],
}


@pytest.mark.parametrize("arguments", MODULE_LINES.values(), ids=MODULE_LINES.keys())
async def test_a_command_line(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    show = "import sys; print(sys.argv, sys.path[0], __name__, __package__, __file__, __spec__ and __spec__.name)"
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(show)
    (package / "__init__.py").write_text("")
    (package / "relative.py").write_text("from . import train\nfrom .train import sys\nprint(train.__name__, sys.argv)")
    monkeypatch.chdir(tmp_path)
    if arguments == ["nothing.py"]:
        missing = Launcher(parse_command([sys.executable, *arguments]), os.environ, PRELOAD, 2)
        assert await missing.prepare() == "workers start by exec: nothing.py is not a file"
        assert missing.fork_disabled_reason == "nothing.py is not a file"
        return
    forked, plain = await run_both_ways([sys.executable, *arguments], tmp_path)
    assert forked == plain


async def test_an_empty_preload_disables_the_fork_server_without_a_reason() -> None:
    launcher = Launcher(parse_command([sys.executable, "train.py"]), os.environ, (), 2)
    assert await launcher.prepare() == "workers start by exec: preload is empty"
    assert launcher.fork_disabled_reason == ""


PYTHON_VARIABLES = {
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONWARNINGS": "error::UserWarning",
    "PYTHONOPTIMIZE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONTRACEMALLOC": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONASYNCIODEBUG": "1",
    "PYTHONINTMAXSTRDIGITS": "5000",
}


async def test_python_variables_have_the_same_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text("""
import asyncio, faulthandler, os, sys, tracemalloc, warnings
print(sys.flags, sys.path, hash("x"), sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through)
print(__debug__, faulthandler.is_enabled(), tracemalloc.is_tracing(), sys.getfilesystemencoding(), sys.warnoptions)
print([f[:1] + f[2:3] for f in warnings.filters], sys.dont_write_bytecode, asyncio.new_event_loop().get_debug())
print({name: value for name, value in sorted(os.environ.items()) if name.startswith("PYTHON")})
""")
    for name, value in PYTHON_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "extra"))
    forked, plain = await run_both_ways([sys.executable, str(path)], tmp_path)
    assert forked == plain


async def test_a_directory_of_the_path_may_be_created_after_the_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("import late; print(late.__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "extra"))
    async with forking_launcher([sys.executable, str(tmp_path / "script.py")], tmp_path) as launcher:
        (tmp_path / "extra").mkdir()
        (tmp_path / "extra" / "late.py").write_text("")
        assert (await run_workers(launcher, tmp_path))[0] == (0, f"{tmp_path / 'extra' / 'late.py'}\n", "")


async def test_a_changed_script_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("print(1)")
    async with forking_launcher([sys.executable, str(path)], tmp_path) as launcher:
        assert (await run_workers(launcher, tmp_path))[0] == (0, "1\n", "")
        path.write_text("print(2)")
        assert (await run_workers(launcher, tmp_path))[0] == (0, "2\n", "")


async def test_a_script_behind_a_symbolic_link_imports_from_its_real_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text("import neighbour, sys; print(__file__, sys.path[0])")
    (tmp_path / "real" / "neighbour.py").write_text("")
    (tmp_path / "script.py").symlink_to("real/script.py")
    forked, plain = await run_both_ways([sys.executable, str(tmp_path / "script.py")], tmp_path)
    assert forked == plain


async def test_random_numbers_differ_between_workers_and_between_rounds(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())")
    async with forking_launcher([sys.executable, str(path)], tmp_path, ("random", "numpy"), 3) as launcher:
        outputs = [out for _ in range(2) for _, out, _ in await run_workers(launcher, tmp_path)]
    draws = [line for out in outputs for line in out.split()]
    assert len(draws) == len(set(draws)) == 18


async def test_workers_are_children_of_the_agent_with_own_sessions_and_end_with_it(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n))\n"
        "print(os.getppid(), os.getsid(0) == os.getpid(), n.value, open('/proc/self/cmdline').read().split(chr(0))[1])"
    )
    async with forking_launcher([sys.executable, str(path)], tmp_path, workers=2) as launcher:
        (code, out, err), *_ = await run_workers(launcher, tmp_path)
    assert (code, err) == (0, "")
    assert out.split() == [str(os.getpid()), "True", str(int(signal.SIGKILL)), str(path)]


async def test_preforked_workers_are_distinguished_from_workers(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os, signal; os.write(1, b'ready'); signal.pause()")
    async with forking_launcher([sys.executable, str(path)], tmp_path) as launcher:
        preforked = descendants(os.getpid()) - {launcher.fork_server_pid}
        assert preforked, "a job that this node joins does not wait for the fork of its first worker"
        await until(
            lambda: not launcher.without_preforked(descendants(os.getpid()))
        )  # those of an earlier test have ended
        read, write = os.pipe()
        (pid,) = await launcher.start([WorkerStart({}, write, 2)])
        assert pid in preforked
        os.close(write)
        assert await asyncio.to_thread(os.read, read, 5) == b"ready"
        assert launcher.without_preforked(descendants(os.getpid())) == {pid}
        await until(lambda: bool(descendants(os.getpid()) - {pid, launcher.fork_server_pid}))
        assert launcher.without_preforked(descendants(os.getpid())) == {pid}
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, pid, 0)
        os.close(read)


def preforked_by(launcher: Launcher) -> set[int]:
    """Return the processes that wait for the next start."""
    found = descendants(os.getpid())
    return found - launcher.without_preforked(found) - {launcher.fork_server_pid}


def is_child(pid: int) -> bool:
    """Return whether a process is a child of this one: until the one that forked it ends, it is that one's."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())


async def test_a_preforked_worker_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os; os.write(1, str(os.getsid(0)).encode())")
    async with forking_launcher([sys.executable, str(path)], tmp_path) as launcher:
        for killed_just_now in (False, True):
            await until(lambda: len(preforked_by(launcher)) == 1 and all(map(is_child, preforked_by(launcher))))
            (preforked,) = preforked_by(launcher)
            assert launcher.fork_server_pid is not None
            if killed_just_now:  # both are there when the fork server looks
                os.kill(launcher.fork_server_pid, signal.SIGSTOP)
            os.kill(preforked, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, preforked, 0)
            read, write = os.pipe()
            start = asyncio.create_task(launcher.start([WorkerStart({}, write, 2)]))
            await asyncio.sleep(0)
            os.kill(launcher.fork_server_pid, signal.SIGCONT)
            (pid,) = await start
            assert pid != preforked
            os.close(write)
            assert await asyncio.to_thread(os.read, read, 9) == str(pid).encode()
            os.close(read)
            await asyncio.to_thread(os.waitpid, pid, 0)
        assert not launcher.fork_disabled_reason


async def test_a_signal_right_after_the_start_reaches_the_worker(tmp_path: Path) -> None:
    """A fork leads its group a moment after its start; before, the signal goes to the process."""
    path = tmp_path / "script.py"
    path.write_text("import signal; signal.pause()")
    async with forking_launcher([sys.executable, str(path)], tmp_path) as launcher:
        for _ in range(10):
            (pid,) = await launcher.start([WorkerStart({}, 1, 2)])
            signal_group(pid, signal.SIGTERM)
            ended = asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode((await asyncio.wait_for(ended, 30))[1]) == -signal.SIGTERM


PROCESS_GROUP = """
import torch.distributed
class Aborts:
    def __del__(self):
        print("destroyed", flush=True)
        if sys.is_finalizing():
            os.abort()
torch.distributed.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
aborts = Aborts()
"""


@pytest.mark.torch
async def test_a_script_that_succeeds_and_leaves_a_process_group_skips_pythons_finalization(tmp_path: Path) -> None:
    """There, a thread of the process group that releases a tensor ends the process by SIGABRT."""
    path = tmp_path / "script.py"
    path.write_text(LEFT_OPEN + "import atexit\natexit.register(print, 'bye')\n" + PROCESS_GROUP)
    async with forking_launcher([sys.executable, str(path)], tmp_path, ("torch",)) as launcher:
        assert (await run_workers(launcher, tmp_path))[0] == (0, "x\nbye\ndestroyed\n", "left open")


async def test_an_exception_is_written_to_torchs_error_file(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise ValueError('bad batch')")
    async with forking_launcher([sys.executable, str(path)], tmp_path) as launcher:
        await run_workers(launcher, tmp_path)
    assert '"ValueError: bad batch"' in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))", "died in its first parallel operation"),
        ("import os\nos._exit(3)", "the fork server ended"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, name='writer', daemon=True).start()",
            "started 1 thread: writer",
        ),
        (
            "import os, threading, sys\nframe = sys._getframe()\n"
            "while frame and 'SELF_TEST_TIMEOUT' not in frame.f_globals: frame = frame.f_back\n"
            "frame.f_globals['SELF_TEST_TIMEOUT'] = 0.1\n"
            "os.register_at_fork(after_in_child=threading.Event().wait)",
            "hung in its first parallel operation",
        ),
        (
            "import pathlib, sys\nframe = sys._getframe()\n"
            "while frame and 'SELF_TEST_TIMEOUT' not in frame.f_globals: frame = frame.f_back\n"
            "process = frame.f_globals['PROCESS'] = pathlib.Path(__file__).parent / 'process'\n"
            "(process / 'fd').mkdir(parents=True)\n(process / 'fd' / '7').symlink_to('/dev/nvidia0')",
            "opened /dev/nvidia0",
        ),
    ],
    ids=["dies in a fork", "dies", "has threads", "hangs in a fork", "uses a GPU"],
)
async def test_a_fork_server_that_fails_the_self_test_is_not_used(tmp_path: Path, module: str, reason: str) -> None:
    (tmp_path / "bad.py").write_text(module)
    (tmp_path / "script.py").write_text("print('ran')")
    launcher = Launcher(parse_command([sys.executable, str(tmp_path / "script.py")]), os.environ, ("bad",), 2)
    assert reason in await launcher.prepare()
    assert (await run_workers(launcher, tmp_path))[0] == (0, "ran\n", "")


async def test_workers_start_by_exec_after_the_fork_server_has_died(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    launcher = Launcher(parse_command([sys.executable, str(tmp_path / "script.py")]), os.environ, PRELOAD, 2)
    assert "fork server ready" in await launcher.prepare()
    assert launcher.fork_server_pid is not None
    os.kill(launcher.fork_server_pid, signal.SIGKILL)
    assert (await run_workers(launcher, tmp_path))[0] == (0, "ran\n", "")


async def lose_fork_server(launcher: Launcher) -> int:
    """Kill the fork server as the kernel does when memory is short. Return its process id."""
    lost = launcher.fork_server_pid
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, lost, 0)
    launcher.child_ended(lost, -signal.SIGKILL)
    return lost


async def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys; print('json' in sys.modules)")
    launcher = Launcher(parse_command([sys.executable, str(path)]), os.environ, PRELOAD, 2)
    assert "fork server ready" in await launcher.prepare()
    lost = await lose_fork_server(launcher)
    assert launcher.fork_disabled_reason == "the fork server ended by SIGKILL"
    await until(lambda: launcher.fork_server_pid not in (None, lost))
    assert (await run_workers(launcher, tmp_path))[0] == (0, "False\n", ""), "workers start by exec meanwhile"
    await until(lambda: launcher.fork_disabled_reason == "")
    assert (await run_workers(launcher, tmp_path))[0] == (0, "True\n", "")
    launcher.stop_fork_server()


async def test_a_fork_server_that_is_lost_again_and_again_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_supervisor, "MAX_REPLACEMENTS", 1)
    (tmp_path / "script.py").write_text("print('ran')")
    launcher = Launcher(parse_command([sys.executable, str(tmp_path / "script.py")]), os.environ, PRELOAD, 2)
    assert "fork server ready" in await launcher.prepare()
    await lose_fork_server(launcher)
    await until(lambda: launcher.fork_disabled_reason == "")
    await lose_fork_server(launcher)
    await asyncio.sleep(0)
    assert launcher.fork_server_pid is None
    assert (await run_workers(launcher, tmp_path))[0] == (0, "ran\n", "")


OPENBLAS_THREADS = """
import ctypes, numpy
maps = open("/proc/self/maps").read().split()
for path in {word for word in maps if "openblas" in word and word.startswith("/")}:
    library = ctypes.CDLL(path)
    for suffix in ("", "64_"):
        for prefix in ("", "scipy_"):
            if function := getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None):
                print(function())
print(float((numpy.ones((500, 500)) @ numpy.ones((500, 500))).sum()))
"""


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "3"}], ids=str)
async def test_numpy_has_the_same_number_of_threads(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "script.py"
    path.write_text(OPENBLAS_THREADS)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    forked, plain = await run_both_ways([sys.executable, str(path)], tmp_path, ("numpy",))
    assert forked == plain


@pytest.mark.parametrize(
    "arguments", [["script.py"], ["-m", "coverage", "run", "-p", "script.py"]], ids=["start", "run"]
)
async def test_coverage_is_measured(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage starts by a command, or by a variable that the interpreter (of the fork server) reads at its start."""
    coverage = pytest.importorskip("coverage")
    (tmp_path / "script.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\nf(1)\n")
    (tmp_path / "rc").write_text(f"[run]\nparallel=true\ndata_file={tmp_path}/.coverage\ninclude={tmp_path}/script.py")
    monkeypatch.chdir(tmp_path)
    if arguments[0] != "-m":
        (tmp_path / "sitecustomize.py").write_text("import coverage; coverage.process_startup()")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("COVERAGE_PROCESS_START", str(tmp_path / "rc"))
    async with forking_launcher([sys.executable, *arguments], tmp_path, workers=2) as launcher:
        assert [code for code, _, _ in await run_workers(launcher, tmp_path)] == [0, 0]
    files = [entry.path for entry in os.scandir(tmp_path) if entry.name.startswith(".coverage.")]
    data = coverage.CoverageData(str(tmp_path / "all"))
    for file in files:
        part = coverage.CoverageData(file)
        part.read()
        data.update(part)
    assert len(files) >= 2
    assert sorted(data.lines(str(tmp_path / "script.py"))) == [1, 2, 3, 5]


@pytest.mark.torch
async def test_torch_in_forked_workers(tmp_path: Path) -> None:
    """Random numbers differ, the number of threads is that of a new process, backward and data loaders work, CUDA is
    not initialized, and the memory of the imports is shared with the fork server."""
    path = tmp_path / "script.py"
    path.write_text(r"""
import numpy, re, sys, torch
from torch.utils.data import DataLoader
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * index
if __name__ == "__main__":
    private = sum(map(int, re.findall(r"Private_\w+: +([0-9]+)", open("/proc/self/smaps_rollup").read())))
    x = torch.ones(300, 300, requires_grad=True); (x @ x).sum().backward()
    print(torch.rand(1).item(), numpy.random.rand(), private)
    print(torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized(), torch.get_num_threads())
    for method in sys.argv[1:]:
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
""")
    argv = [sys.executable, str(path), "fork", "spawn"]
    async with forking_launcher(argv, tmp_path, ("torch", "torch._dynamo"), 2) as launcher:
        answers = [answer for _ in range(2) for answer in await run_workers(launcher, tmp_path)]
    assert {(code, err) for code, _, err in answers} == {(0, "")}
    forked = [out.split("\n", 1) for _, out, _ in answers]
    plain = (await asyncio.to_thread(subprocess.check_output, argv, text=True)).split("\n", 1)
    assert len({draw for first, _ in forked for draw in first.split()[:2]}) == 8
    assert {rest for _, rest in forked} == {plain[1]}
    assert max(int(first.split()[2]) for first, _ in forked) < int(plain[0].split()[2]) / 2


@pytest.mark.torch
async def test_the_self_test_detects_a_parallel_region_in_the_fork_server(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("""
import sys, torch
frame = sys._getframe()
while "SELF_TEST_TIMEOUT" not in frame.f_globals:
    frame = frame.f_back
frame.f_globals["SELF_TEST_TIMEOUT"] = 3.0
torch.set_num_threads(2)
torch.ones(1 << 22).exp().sum()
""")
    (tmp_path / "script.py").write_text("print('ran')")
    launcher = Launcher(parse_command([sys.executable, str(tmp_path / "script.py")]), os.environ, ("bad",), 2)
    assert "workers start by exec: " in (message := await launcher.prepare())
    assert "hung in its first parallel operation" in message or "importing the preloaded modules started" in message
    assert message.endswith(f": {launcher.fork_disabled_reason}")
    assert (await run_workers(launcher, tmp_path))[0] == (0, "ran\n", "")


@pytest.mark.torch
async def test_the_default_imports_read_nothing_that_differs_between_workers(tmp_path: Path) -> None:
    """Forks have the values that the fork server read at the import."""
    (tmp_path / "script.py").write_text("""
import os
read = set()
class Recorded(type(os.environ)):
    def __getitem__(self, name):
        read.add(name)
        return super().__getitem__(name)
os.environ.__class__ = Recorded
import torch, torch._dynamo
from elasticjob._runtime.agent.start_workers.fork_server.torch_backends import find_backends
find_backends()
print("\\n".join(sorted(read)))
""")
    output = await asyncio.to_thread(subprocess.check_output, [sys.executable, str(tmp_path / "script.py")], text=True)
    start = StartRound(RoundId(1, 0, 1), 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 0)
    worker = worker_env(
        start, local_rank=0, local_world_size=1, role="r", run_id="i", error_file="e", agent_socket="s", base={}
    )
    assert (names := set(output.split())) >= {"HOME", "PYTORCH_JIT", "TORCH_LOGS", "TORCH_COMPILE_DISABLE"}
    assert not names & set(worker)


@pytest.mark.torch
async def test_a_process_group_of_a_worker_does_not_look_for_packages_that_provide_it(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("""
import importlib.metadata
import torch.distributed as dist
def entry_points(**_):
    raise AssertionError("reads the metadata of all packages")
importlib.metadata.entry_points = entry_points
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), dist.Backend.default_device_backend_map["cuda"])
""")
    async with forking_launcher([sys.executable, str(path)], tmp_path, ("torch",)) as launcher:
        assert await run_workers(launcher, tmp_path) == [(0, "gloo nccl\n", "")]


@pytest.mark.torch
async def test_the_functions_for_training_code_are_imported_unless_the_program_has_its_own_package(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys; print('elasticjob.training.replicated.state' in sys.modules, 'elasticjob' in sys.modules)"
    )
    async with forking_launcher([sys.executable, str(path)], tmp_path, ("torch",)) as launcher:
        assert await run_workers(launcher, tmp_path) == [(0, "True True\n", "")]
    (tmp_path / "elasticjob.py").write_text("")
    async with forking_launcher([sys.executable, str(path)], tmp_path, ("torch",)) as launcher:
        assert await run_workers(launcher, tmp_path) == [(0, "False False\n", "")]

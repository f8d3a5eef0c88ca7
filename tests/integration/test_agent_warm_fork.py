"""Workers forked from the warm process behave as those started by `python`: the same programs, both ways."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elasticjob.agent.command import read_command
from elasticjob.agent.launcher import Launcher, WorkerStart
from elasticjob.agent.processes import become_subreaper

PRELOAD = ("json", "random", "multiprocessing")


@asynccontextmanager
async def launcher(
    argv: Sequence[str], folder: Path, preload: Sequence[str] = PRELOAD, workers: int = 1
) -> AsyncIterator[Launcher]:
    """A launcher that is warm."""
    become_subreaper()
    with (folder / "warm.log").open("wb") as log:
        launcher = Launcher(read_command(argv), {**os.environ, "BASE": "1"}, preload, log.fileno(), workers)
        what = await launcher.prepare()
        assert what.startswith("warm after"), (what, (folder / "warm.log").read_text())
        warm_pid = launcher.warm_pid
        assert warm_pid is not None
        try:
            yield launcher
        finally:
            launcher.stop_warm()
            await asyncio.to_thread(os.waitpid, warm_pid, 0)


async def fork(launcher: Launcher, folder: Path) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each worker."""
    names = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(launcher.workers)]
    files = [(out.open("wb"), err.open("wb")) for out, err in names]
    env = {"WORKER": "yes", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    pids = await launcher.start([WorkerStart(env, out.fileno(), err.fileno()) for out, err in files])
    codes = [os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) for pid in pids]
    for pair in files:
        for file in pair:
            file.close()
    return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, names, strict=True)]


async def both_ways(argv: Sequence[str], folder: Path) -> tuple[object, object]:
    """What a program does when forked, and when started by exec."""
    async with launcher(argv, folder) as warm:
        forked = (await fork(warm, folder))[0]
    env = {**os.environ, "BASE": "1", "WORKER": "yes", "TORCHELASTIC_ERROR_FILE": str(folder / "other.json")}
    plain = await asyncio.to_thread(
        subprocess.run, argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return forked, (plain.returncode, plain.stdout, plain.stderr)


PROGRAMS = {
    "arguments and paths": "import sys; print(sys.argv, sys.path[0], sys.orig_argv, sys.executable, sys.flags)",
    "main module": """
import __main__, inspect, sys
print(__name__, __file__, __spec__, __cached__, __package__, type(__loader__).__name__)
print(__main__ is sys.modules[__name__])
print(sorted(vars()))
def f(): pass
print(inspect.getsource(f), inspect.getfile(f))
""",
    "annotations are not postponed": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "environment": "import os; print(os.environ['BASE'], os.environ['WORKER'], 'OPENBLAS_NUM_THREADS' in os.environ)",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('gone')",
    "no exit code": "raise SystemExit",
    "exception": "def f():\n    raise ValueError('bad')\nf()",
    "chained exception": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e",
    "syntax error": "def f(:\n    pass",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\nraise ValueError('bad')",
    "atexit and output that is not flushed": "import atexit\natexit.register(print, 'bye')\nprint('x')",
    "atexit after an exception": "import atexit\natexit.register(print, 'bye')\nraise ValueError",
    "threads are waited for": """
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
    "dataclass in main": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nprint(A())",
}


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_a_script(text: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    forked, plain = await both_ways([sys.executable, str(path), "--lr", "1"], tmp_path)
    assert forked == plain


MODULE_LINES = {
    "a module": ["-m", "pkg.train", "a"],
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


@pytest.mark.parametrize("words", MODULE_LINES.values(), ids=MODULE_LINES.keys())
async def test_a_command_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    show = "import sys; print(sys.argv, sys.path[0], __name__, __package__, __file__, __spec__ and __spec__.name)"
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(show)
    (package / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    if words == ["nothing.py"]:
        warm = Launcher(read_command([sys.executable, *words]), os.environ, PRELOAD, 2)
        assert await warm.prepare() == "workers start by exec: nothing.py is not a file"
        return
    forked, plain = await both_ways([sys.executable, *words], tmp_path)
    assert forked == plain


async def test_a_symbolic_link_to_a_script_imports_from_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text("import neighbour, sys; print(__file__, sys.path[0])")
    (tmp_path / "real" / "neighbour.py").write_text("")
    (tmp_path / "script.py").symlink_to("real/script.py")
    forked, plain = await both_ways([sys.executable, str(tmp_path / "script.py")], tmp_path)
    assert forked == plain


async def test_draws_differ_between_workers_and_from_one_fork_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())")
    async with launcher([sys.executable, str(path)], tmp_path, ("random", "numpy"), 3) as warm:
        said = [out for _ in range(2) for _, out, _ in await fork(warm, tmp_path)]
    draws = [line for out in said for line in out.split()]
    assert len(draws) == len(set(draws)) == 18


async def test_workers_are_our_children_in_sessions_of_their_own_and_die_with_us(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n))\n"
        "print(os.getppid(), os.getsid(0) == os.getpid(), n.value, open('/proc/self/cmdline').read().split(chr(0))[1])"
    )
    async with launcher([sys.executable, str(path)], tmp_path, workers=2) as warm:
        (code, out, err), *_ = await fork(warm, tmp_path)
    assert (code, err) == (0, "")
    assert out.split() == [str(os.getpid()), "True", str(int(signal.SIGKILL)), str(path)]


async def test_an_exception_is_left_in_torchs_error_file(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise ValueError('bad batch')")
    async with launcher([sys.executable, str(path)], tmp_path) as warm:
        await fork(warm, tmp_path)
    assert '"ValueError: bad batch"' in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))", "died in its first parallel operation"),
        ("import os\nos._exit(3)", "the warm process ended"),
    ],
)
async def test_a_warm_process_that_cannot_be_trusted_is_not_used(tmp_path: Path, module: str, why: str) -> None:
    (tmp_path / "bad.py").write_text(module)
    (tmp_path / "script.py").write_text("print('ran')")
    warm = Launcher(read_command([sys.executable, str(tmp_path / "script.py")]), os.environ, ("bad",), 2)
    assert why in await warm.prepare()
    assert (await fork(warm, tmp_path))[0] == (0, "ran\n", "")


async def test_a_warm_process_that_dies_later_is_replaced_by_exec(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    warm = Launcher(read_command([sys.executable, str(tmp_path / "script.py")]), os.environ, PRELOAD, 2)
    assert "warm" in await warm.prepare()
    assert warm.warm_pid is not None
    os.kill(warm.warm_pid, signal.SIGKILL)
    assert (await fork(warm, tmp_path))[0] == (0, "ran\n", "")


@pytest.mark.torch
@pytest.mark.timeout(180)
async def test_torch_in_forked_workers(tmp_path: Path) -> None:
    """Draws differ, threads are those of a new process, backward works, and CUDA is untouched."""
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, numpy\n"
        "x = torch.ones(300, 300, requires_grad=True); (x @ x).sum().backward()\n"
        "print(torch.rand(1).item(), numpy.random.rand(), torch.cuda._is_in_bad_fork(), torch.get_num_threads())"
    )
    async with launcher([sys.executable, str(path)], tmp_path, ("torch", "torch._dynamo"), 2) as warm:
        forked = [out.split() for _ in range(2) for _, out, _ in await fork(warm, tmp_path)]
    plain = await asyncio.to_thread(subprocess.check_output, [sys.executable, str(path)], text=True)
    assert len({value for said in forked for value in said[:2]}) == 8
    assert {tuple(said[2:]) for said in forked} == {tuple(plain.split()[2:])}

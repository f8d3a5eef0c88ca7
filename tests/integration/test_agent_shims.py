"""`python` and `torchrun` inside a shell run as forks, and behave as when they are started by exec."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.processes import become_subreaper, descendants, reap
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart
from elasticjob._runtime.agent.start_workers.shims.shim_server import likely_python
from support.local.run import LocalRun, manifest

SCRIPT = """
import os, sys
print(sys.argv, sys.path[0], sys.orig_argv, sys.executable, os.getcwd(), __name__, __file__, oct(os.umask(0)))
print(sys.stdin.read() if not sys.stdin.closed else "closed", os.environ.get("ADDED"), os.environ["PATH"])
print([(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)])
print(sys.stdin.name, sys.stdout.isatty(), os.environ.get("SHLVL"))
"""
MARK = "import sys; print('forked' if 'marker' in sys.modules else 'not forked')"


class Agent:
    """The part of an agent that starts workers and reaps children."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self._folder = folder
        self._ends: dict[int, int] = {}
        self._changed = asyncio.Event()

    def reaped(self) -> None:
        for pid, code in reap():
            self.launcher.child_ended(pid, code)
            self._ends[pid] = code
        self._changed.set()

    async def end(self, pid: int) -> int:
        while pid not in self._ends:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)
        return self._ends[pid]

    async def start(self) -> int:
        with (self._folder / "out").open("wb") as out, (self._folder / "err").open("wb") as err:
            (pid,) = await self.launcher.start([WorkerStart({"WORKER": "1"}, out.fileno(), err.fileno())])
        return pid

    async def run(self) -> tuple[int, str, str]:
        code = await self.end(await self.start())
        return code, (self._folder / "out").read_text(), (self._folder / "err").read_text()

    async def run_preforked(self) -> list[str]:
        """Wait until all workers are forked ahead of need, run them, and return their output."""
        deadline = time.monotonic() + 60
        while len(waiting := preforked(self.launcher)) < self.launcher.workers:
            assert time.monotonic() < deadline, waiting
            await asyncio.sleep(0.05)
        outputs = [self._folder / f"{rank}.out" for rank in range(self.launcher.workers)]
        files = [path.open("wb") for path in outputs]
        wanted = [WorkerStart({"RANK": str(i)}, file.fileno(), 2) for i, file in enumerate(files)]
        for pid in await self.launcher.start(wanted):
            await self.end(pid)
        for file in files:
            file.close()
        return [path.read_text() for path in outputs]


def preforked(launcher: Launcher) -> set[int]:
    """Return the processes that wait to become workers."""
    pids = descendants(os.getpid())
    return {pid for pid in pids - launcher.without_preforked(pids) if pid != launcher.fork_server_pid}


@asynccontextmanager
async def running_agent(
    text: str, folder: Path, env: Mapping[str, str], shell: str = "bash", workers: int = 1, *, forks: bool = True
) -> AsyncIterator[Agent]:
    """Run an agent whose command is a shell with this text."""
    (folder / "marker.py").write_text("")
    scratch = folder / "scratch"
    scratch.mkdir()
    become_subreaper()
    loop = asyncio.get_running_loop()
    with (folder / "fork_server.log").open("wb") as log:
        command, env = parse_command([shell, "-c", text]), {**env, "PYTHONPATH": str(folder)}
        launcher = Launcher(command, env, ["marker"] if forks else [], log.fileno(), workers, scratch)
        agent = Agent(launcher, folder)
        loop.add_signal_handler(signal.SIGCHLD, agent.reaped)
        try:
            message = await launcher.prepare()
            if forks:
                assert message.startswith("fork server ready after"), (folder / "fork_server.log").read_text()
                assert message.endswith(f" inside {shell}")
            fork_server = launcher.fork_server_pid
            yield agent
            launcher.close()
            if fork_server is not None:
                await agent.end(fork_server)
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)


@pytest.fixture
def env() -> dict[str, str]:
    """An environment in which `python` is this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "HOME": "/", "LANG": "C.UTF-8"}


COMMANDS = {
    "a script": "python script.py a 'b c'; true",
    "by exec": "exec python script.py a",
    "the last command": "python script.py a",
    "python3": "python3 script.py; true",
    "unbuffered": "python -u script.py; true",
    "a module": "python -m script x; true",
    "code": "python -c 'import sys; print(sys.argv, sys.path[0], sys.orig_argv, __name__)' 1 2; true",
    "another directory and environment": "cd / && ADDED=1 python $OLDPWD/script.py; true",
    "umask": "umask 077; python script.py; true",
    "resource limits": "ulimit -n 99; python -c 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))'",
    "stdin is a pipe": "echo hello | python script.py; true",
    "stdin is a file": "python script.py < marker.py; true",
    "stdin is closed": "python -c 'import sys; print(sys.stdin)' <&-; true",
    "output to a file": "python script.py > file 2>&1; cat file",
    "a pipe between two": "python -c 'print(1)' | python -c 'print(input() * 3)'; true",
    "another descriptor": "python -c 'import os; print(os.read(7, 9))' 7<<<hello; true",
    "process substitution": "python -c 'import sys; print(open(sys.argv[1]).read())' <(echo hello); true",
    "exit code": "python -c 'import sys; sys.exit(7)'; echo $?",
    "an exception": "python -c '1 / 0'; echo $?",
    "end by a signal": "python -c 'import os; os.kill(os.getpid(), 15)'; echo $?",
    "the worker ends by a signal": "exec python -c 'import os; os.kill(os.getpid(), 9)'",
    "in the background": "python -c 'print(1)' & wait $!; echo $?",
    "ignored signals": "trap '' HUP; python -c 'import signal; print(signal.getsignal(1))'; true",
    "a program from standard input": "echo 'print(1)' | python -; true",
    "a subprocess": 'python -c \'import subprocess; subprocess.run(["python", "script.py"])\' < marker.py; true',
    "no such script": "python nothing.py; echo $?",
    "version": "python --version",
    "an argument that is not valid text": "python -c 'import sys; print(ascii(sys.argv))' $'\\377'; true",
}


@pytest.mark.parametrize("text", COMMANDS.values(), ids=COMMANDS.keys())
async def test_a_command(text: str, tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    async with running_agent(text, tmp_path, env) as agent:
        forked = await agent.run()
    path = {"WORKER": "1", "PYTHONPATH": str(tmp_path)}
    plain = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", text], env={**env, **path}, capture_output=True, text=True, stdin=-3
    )
    assert forked == (plain.returncode, plain.stdout.replace(str(tmp_path / "scratch"), ""), plain.stderr)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", "forked"),
        ("NCCL_DEBUG=INFO ", "forked"),
        ("OMP_NUM_THREADS=7 ", "not forked"),
        ("PYTHONHASHSEED=1 ", "not forked"),
        ("nice ", "not forked"),
        (sys.executable.rsplit("/", 1)[0] + "/", "not forked"),
    ],
)
async def test_a_process_is_forked_only_if_a_fork_can_take_its_place(
    prefix: str, expected: str, tmp_path: Path, env: dict[str, str]
) -> None:
    async with running_agent(f'{prefix}python -c "{MARK}"; true', tmp_path, env) as agent:
        assert await agent.run() == (0, f"{expected}\n", "")


@pytest.mark.parametrize(("shell", "forks"), [("bash", True), ("sh", True), ("bash", False)])
async def test_torchrun_and_its_module_run_the_script_as_the_worker(
    shell: str, forks: bool, tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nraise SystemExit('torchrun itself')")
    torchrun.chmod(0o755)
    (tmp_path / "script.py").write_text(f"{MARK}\nprint(sys.argv[1:])")
    env["PATH"] = os.pathsep.join([str(tmp_path / "bin"), env["PATH"]])
    text = f"cd {tmp_path} && torchrun --nproc-per-node 8 script.py a && python -m torch.distributed.run script.py b"
    async with running_agent(text, tmp_path, env, shell, forks=forks) as agent:
        how = "forked" if forks else "not forked"
        assert await agent.run() == (0, f"{how}\n['a']\n{how}\n['b']\n", "")


async def test_a_torchrun_that_cannot_be_forked_any_more_runs_its_script_by_exec(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(f"{MARK}\nprint(sys.argv[1:])")
    text = f"cd {tmp_path} && torchrun --nproc-per-node 8 script.py a; true"
    async with running_agent(text, tmp_path, env) as agent:
        agent.launcher.stop_fork_server()
        assert await agent.run() == (0, "not forked\n['a']\n", "")


WAIT = """
import signal, sys, time
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
print("ready", flush=True)
signal.pause()
"""


async def until_written(path: Path, text: str) -> None:
    def wait() -> None:
        while text not in path.read_text():
            pass

    await asyncio.wait_for(asyncio.to_thread(wait), 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
async def test_signals_reach_the_process_and_its_exit_code_comes_back(
    number: signal.Signals, tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    async with running_agent(f"exec python {tmp_path}/wait.py", tmp_path, env) as agent:
        pid = await agent.start()
        await until_written(tmp_path / "out", "ready")
        os.killpg(pid, number)
        assert await agent.end(pid) == 3
    assert (tmp_path / "out").read_text() == f"ready\ngot {number.value}\n"


async def test_a_process_does_not_outlive_its_shim(tmp_path: Path, env: dict[str, str]) -> None:
    """A shim that is killed takes its fork with it, as if the fork itself had been killed."""
    (tmp_path / "wait.py").write_text(f"import os; print(os.getpid(), flush=True)\n{WAIT}")
    async with running_agent(f"exec python {tmp_path}/wait.py", tmp_path, env) as agent:
        shim = await agent.start()
        await until_written(tmp_path / "out", "ready")
        pid = int((tmp_path / "out").read_text().split()[0])
        assert pid != shim
        os.kill(shim, signal.SIGKILL)
        assert await agent.end(pid) == -signal.SIGKILL


async def test_workers_start_concurrently(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(f"""
import os, time
open(os.environ["RANK"] + ".started", "w").close()
while not (os.path.exists("0.started") and os.path.exists("1.started")):
    time.sleep(0.01)
{MARK}
""")
    async with running_agent(f"cd {tmp_path} && python script.py", tmp_path, env, workers=2) as agent:
        assert await agent.run_preforked() == ["forked\n"] * 2


async def test_a_shim_without_agent_executes_the_program(tmp_path: Path, env: dict[str, str]) -> None:
    async with running_agent(f'python -c "{MARK}"; true', tmp_path, env) as agent:
        (tmp_path / "scratch" / "bin" / "agent").unlink()
        assert await agent.run() == (0, "not forked\n", "")


def test_a_killed_worker_in_a_shell_is_forked_again(tmp_path: Path, env: dict[str, str]) -> None:
    done = tmp_path / "done"
    (tmp_path / "marker.py").write_text("")
    (tmp_path / "script.py").write_text(f"""
import os, time
{MARK}
print("started", os.environ["RANK"], os.getpid(), flush=True)
while not os.path.exists({str(done)!r}):
    time.sleep(0.01)
""")
    command = ["bash", "-c", f"cd {tmp_path} && PATH=$PATH && python script.py && echo after"]
    job = manifest(command, nprocPerNode=2, preload=["marker"])
    spec: Any = job["spec"]
    variables = {**env, "PYTHONPATH": str(tmp_path)}
    spec["template"]["spec"]["containers"][0]["env"] = [{"name": k, "value": v} for k, v in variables.items()]
    with LocalRun(job, tmp_path) as run:
        os.kill(int(run.wait_for(r"started 1 (\d+)")[1]), signal.SIGKILL)
        run.wait_for("WorkerFailed: rank 1 died")
        run.wait_for("round 1.0.2 runs: 2 workers on 1 pod")
        done.touch()
        assert run.exit_code() == 0
    assert "not forked" not in run.text
    assert run.text.count("]:after") == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["bash", "-c", "cd x; python3.9 a.py || python b.py"], "python3.9"),
        (["bash", "run.sh"], "python"),
        (["bash", "-c", "pythonic x; ./mypython y"], "python"),
        (["env", "A=1", "python3", "x.py"], "python3"),
    ],
)
def test_likely_python(argv: list[str], expected: str, tmp_path: Path) -> None:
    for name in ("python", "python3", "python3.9"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert likely_python(argv, {"PATH": str(tmp_path)}) == str(tmp_path / expected)
    assert likely_python(argv, {"PATH": str(tmp_path / "nothing")}) is None

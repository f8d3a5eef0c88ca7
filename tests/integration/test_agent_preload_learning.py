"""Preload learning: later workers start with the imports of the first ones done, and nothing else changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elasticjob._runtime.agent.processes import become_subreaper, descendants
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("own_threads")]

SCRIPT = """
import os, sys
at_start = [name in sys.modules for name in ("torch", "heavy", "mine")]
import torch, heavy, mine
x = torch.ones(300, 300, requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
for _ in range(2):
    (x @ x).sum().backward()
    optimizer.step()
print(at_start, mine.TEXT, torch.cuda._is_in_bad_fork(), os.getppid() == int(os.environ["AGENT"]))
"""
BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"


@asynccontextmanager
async def launcher_for(folder: Path, monkeypatch: pytest.MonkeyPatch, heavy: str) -> AsyncIterator[Launcher]:
    """Prepare a launcher for a script that imports a library `heavy`, and `mine` from its own directory."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "heavy.py").write_text(heavy)
    (folder / "mine.py").write_text("TEXT = 'first'")
    (folder / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site-packages"))
    monkeypatch.setenv("AGENT", str(os.getpid()))
    become_subreaper()
    with (folder / "fork_server.log").open("wb") as log:
        command = parse_command([sys.executable, str(folder / "script.py")])
        launcher = Launcher(command, os.environ, ("torch",), log.fileno(), 2)
        assert (await launcher.prepare()).startswith("fork server ready after")
        pid = launcher.fork_server_pid
        assert pid is not None
        try:
            yield launcher
        finally:
            launcher.stop_fork_server()
            await asyncio.to_thread(os.waitpid, pid, 0)
            await all_ended()


async def all_ended() -> None:
    """Wait until no process is left: pre-forked workers end when their fork server ends."""
    deadline = time.monotonic() + 30
    while left := descendants(os.getpid()):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


async def run(launcher: Launcher, folder: Path) -> list[str]:
    """Run the workers and return their output."""
    outputs = [folder / f"{rank}.out" for rank in range(2)]
    files = [path.open("wb") for path in outputs]
    pids = await launcher.start([WorkerStart({"RANK": str(i)}, f.fileno(), 2) for i, f in enumerate(files)])
    codes = [os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) for pid in pids]
    for file in files:
        file.close()
    assert codes == [0, 0]
    return [path.read_text().strip() for path in outputs]


async def learning_result(folder: Path) -> str:
    """Wait until the fork server logs the result of preload learning, and return its log."""
    deadline = time.monotonic() + 120
    while "libraries that the last workers imported" not in (text := (folder / "fork_server.log").read_text()):
        assert time.monotonic() < deadline, text
        await asyncio.sleep(0.05)
    return text


async def test_libraries_are_preloaded_and_the_modules_of_the_user_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launcher_for(tmp_path, monkeypatch, BUSY) as launcher:
        assert await run(launcher, tmp_path) == ["[True, False, False] first False True"] * 2
        assert "libraries that the last workers imported are now preloaded" in await learning_result(tmp_path)
        (tmp_path / "mine.py").write_text("TEXT = 'changed'")
        for _ in range(2):
            assert await run(launcher, tmp_path) == ["[True, True, False] changed False True"] * 2
        assert launcher.fork_server_pid is not None
        candidate = max(descendants(launcher.fork_server_pid), key=lambda pid: len(descendants(pid)))
        os.kill(candidate, signal.SIGKILL)
        assert await run(launcher, tmp_path) == ["[False, False, False] changed False True"] * 2


@pytest.mark.parametrize(
    ("heavy", "reason"),
    [
        (
            "import os\nif 'RANK' not in os.environ: os._exit(3)",
            "the process that imported them ended with exit code 3",
        ),
        (
            f"{BUSY}import threading\n"
            "threading.Thread(target=threading.Event().wait, name='writer', daemon=True).start()",
            "started 1 thread: writer",
        ),
    ],
    ids=["dies", "has threads"],
)
async def test_libraries_that_forks_cannot_share_are_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heavy: str, reason: str
) -> None:
    async with launcher_for(tmp_path, monkeypatch, heavy) as launcher:
        for _ in range(2):
            assert await run(launcher, tmp_path) == ["[True, False, False] first False True"] * 2
            assert reason in await learning_result(tmp_path)

"""What a script sets before it imports a preloaded module has the effect that it has under plain Python."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elasticjob._runtime.agent.processes import become_subreaper
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart
from elasticjob._runtime.contract.names import early_variable_file

pytestmark = pytest.mark.usefixtures("own_threads")

MODULE = """
import os
LEVEL = os.environ.get("LIBRARY_LEVEL", "unset")
"""
SETS = {
    "an assignment": "os.environ['LIBRARY_LEVEL'] = 'debug'",
    "a default": "os.environ.setdefault('LIBRARY_LEVEL', 'debug')",
    "an update": "os.environ.update(LIBRARY_LEVEL='debug')",
    "in a module of the program": "import settings",
    "in a function": "def f(): os.environ['LIBRARY_LEVEL'] = 'debug'\nf()",
}


@asynccontextmanager
async def forking(script: Path, preload: tuple[str, ...]) -> AsyncIterator[Launcher]:
    become_subreaper()
    argv = [sys.executable, "-u", str(script), "argument"]
    launcher = Launcher(parse_command(argv), {**os.environ, "PYTHONPATH": str(script.parent)}, preload, 2)
    assert "fork server ready" in await launcher.prepare()
    try:
        yield launcher
    finally:
        launcher.stop_fork_server()


async def run(launcher: Launcher, folder: Path) -> tuple[int, str, str]:
    """Run the worker; return exit code, stdout and stderr."""
    out, err, error_file = folder / "out", folder / "err", folder / "error.json"
    with out.open("wb") as output, err.open("wb") as errors:
        env = {"TORCHELASTIC_ERROR_FILE": str(error_file), "RANK": "0"}
        (pid,) = await launcher.start([WorkerStart(env, output.fileno(), errors.fileno())])
    code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
    launcher.record_early_variable(str(error_file))
    return code, out.read_text(), err.read_text()


def write_program(folder: Path, text: str) -> Path:
    (folder / "library.py").write_text(MODULE)
    (folder / "settings.py").write_text("import os\nos.environ['LIBRARY_LEVEL'] = 'debug'")
    script = folder / "script.py"
    script.write_text(f"import os, sys\n{text}")
    return script


@pytest.mark.parametrize("text", SETS.values(), ids=SETS.keys())
async def test_a_script_sets_what_a_preloaded_module_has_read(text: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, f"{text}\nimport library\nprint(library.LEVEL, sys.argv[1], os.environ['RANK'])")
    async with forking(script, ("library",)) as launcher:
        code, out, err = await run(launcher, tmp_path)
        assert (code, out) == (0, "debug argument 0\n")
        assert "the script sets LIBRARY_LEVEL" in err
        assert "this process starts again by exec" in err
        assert launcher.fork_disabled_reason.startswith("the script sets LIBRARY_LEVEL")
        os.unlink(early_variable_file(str(tmp_path / "error.json")))  # noqa: PTH108
        assert await run(launcher, tmp_path) == (0, "debug argument 0\n", ""), "the next one starts by exec at once"


NO_NEED = {
    "a variable that was not read": "os.environ['OTHER'] = 'debug'\nimport library",
    "the same value": "os.environ['LIBRARY_SAME'] = 'same'\nimport library",
    "after the import": "import library\nos.environ['LIBRARY_LEVEL'] = 'debug'",
    "in a child process": """
if os.fork() == 0:
    os.environ['LIBRARY_LEVEL'] = 'x'
    os._exit(0)
os.wait()
import library
""",
}


@pytest.mark.parametrize("text", NO_NEED.values(), ids=NO_NEED.keys())
async def test_a_fork_goes_on_where_the_setting_changes_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRARY_SAME", "same")
    script = write_program(tmp_path, f"{text}\nprint(library.LEVEL, type(os.environ).__name__)")
    async with forking(script, ("library",)) as launcher:
        assert await run(launcher, tmp_path) == (0, "unset _Environ\n", "")
        assert launcher.fork_disabled_reason == ""


async def test_a_script_that_has_begun_more_than_itself_goes_on_and_says_so(tmp_path: Path) -> None:
    text = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.environ["LIBRARY_LEVEL"] = "debug"
import library
print(library.LEVEL)
"""
    async with forking(write_program(tmp_path, text), ("library",)) as launcher:
        code, out, err = await run(launcher, tmp_path)
        assert (code, out) == (0, "unset\n")
        assert "it has no effect in this process, which has started threads" in err
        assert launcher.fork_disabled_reason


TORCH = """
os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL", OMP_NUM_THREADS="1", PYTORCH_JIT="0", TORCH_LOGS="+dynamo")
import logging, torch, torch.distributed, torch._dynamo
print(torch.distributed.get_debug_level(), torch.get_num_threads(), torch.jit._state._enabled.enabled)
print(logging.getLogger("torch._dynamo").level)
"""


@pytest.mark.torch
async def test_torchs_switches_have_their_effect(tmp_path: Path) -> None:
    script = write_program(tmp_path, TORCH)
    async with forking(script, ("torch", "torch._dynamo")) as launcher:
        code, out, _ = await run(launcher, tmp_path)
    plain = await asyncio.to_thread(lambda: subprocess.check_output([sys.executable, script], text=True))
    assert (code, out) == (0, plain)
    assert out.startswith("DebugLevel.DETAIL 1 False")

"""Whether a torch has libuv, which its stores ask for by default; some distributions build without it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

WITHOUT_LIBUV = str(Path(__file__).parent / "without_libuv")
"""On PYTHONPATH of workers that start by exec."""
_FIND_LIBUV = """
import importlib.util, glob, mmap, os
spec = importlib.util.find_spec("torch")
for root in (spec.submodule_search_locations if spec else ()):
    for path in glob.glob(os.path.join(root, "lib", "libtorch_cpu.so")):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            print("libuv" if data.rfind(b"uv_tcp_init") >= 0 else "none")
"""
"""Without importing torch: its library, which the workers read anyway, names libuv's functions if it has them."""


async def has_libuv(python: str, env: Mapping[str, str]) -> bool:
    """Asked of the interpreter's torch, by its files; True where there is no torch to ask, or the user has said."""
    if "USE_LIBUV" in env or (path := shutil.which(python, path=env.get("PATH"))) is None:
        return True
    asked = asyncio.get_running_loop().run_in_executor(None, _ask, [path, "-c", _FIND_LIBUV], env)
    return "none" not in await asked


def _ask(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Standard output of a short program, read to its end: its exit status may go to the agent's reaper."""
    read, write = os.pipe()
    with os.fdopen(read) as answer:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.DEVNULL, start_new_session=True
        )
        process.returncode = 0
        os.close(write)
        return answer.read()

"""Find out whether a torch was built with libuv. torch's stores use it by default; some distributions lack it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

_FIND_LIBUV = """
import importlib.util, glob, mmap, os
spec = importlib.util.find_spec("torch")
for root in (spec.submodule_search_locations if spec else ()):
    for path in glob.glob(os.path.join(root, "lib", "libtorch_cpu.so")):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            print("libuv" if data.rfind(b"uv_tcp_init") >= 0 else "none")
"""
"""Search torch's library for a function name of libuv. The workers load that file anyway; importing torch is slow."""


async def has_libuv(python: str, env: Mapping[str, str]) -> bool:
    """Return whether the torch of an interpreter has libuv; True if there is no torch or the user sets USE_LIBUV."""
    if "USE_LIBUV" in env or (path := shutil.which(python, path=env.get("PATH"))) is None:
        return True
    output = asyncio.get_running_loop().run_in_executor(None, _run, [path, "-c", _FIND_LIBUV], env)
    return "none" not in await output


def _run(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the standard output of a short program.

    It waits for the end of the output and not for the process: the agent's reaper may collect the exit status first.
    """
    read, write = os.pipe()
    with os.fdopen(read) as output:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.DEVNULL, start_new_session=True
        )
        process.returncode = 0  # the agent reaps; Popen must not
        os.close(write)
        return output.read()

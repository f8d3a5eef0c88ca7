"""Importing in a process that will be forked, and whether its forks can be trusted afterwards."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SELF_TEST_TIMEOUT = 20.0
"""Seconds: the trial takes milliseconds, but four nodes may be importing on two cores."""
_HELD_AT_IMPORT = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""While importing: numpy's OpenBLAS starts no thread, and `torch.cuda.is_available()` creates no CUDA state."""


@contextmanager
def import_environment() -> Iterator[None]:
    """The environment for imports; afterwards what it was."""
    held = {name: os.environ.get(name) for name in _HELD_AT_IMPORT}
    os.environ.update(_HELD_AT_IMPORT)
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def import_modules(modules: list[str]) -> list[str]:
    """Import what can be imported; what cannot is the script's business."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    return missing


def check_threads() -> dict[str, Any] | None:
    """A fork has none of its parent's other threads, and whatever they held locked stays locked."""
    count = len(list(os.scandir("/proc/self/task"))) - 1
    if not count:
        return None
    names = ", ".join(sorted({t.name for t in threading.enumerate() if t is not threading.main_thread()}))
    why = f"importing the preloaded modules started {count} thread(s){f': {names}' if names else ''}"
    return {"ready": False, "why": why}


def run_self_test() -> dict[str, Any]:
    """Fork once and compute in parallel: an OpenMP region entered before the fork would hang there for ever."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try(writable)
    os.close(writable)
    heard, _, _ = select.select([readable], [], [], SELF_TEST_TIMEOUT)
    answer = os.read(readable, 4096) if heard else b""
    os.close(readable)
    if not answer:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not heard:
        return {"ready": False, "why": f"a forked process hung in its first parallel operation ({SELF_TEST_TIMEOUT} s)"}
    if not answer:
        return {"ready": False, "why": "a forked process died in its first parallel operation"}
    result: dict[str, Any] = json.loads(answer)
    return result


def _try(writable: int) -> None:
    """In the trial fork: compute, answer, end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        torch = sys.modules.get("torch")
        result = {"ready": True, "libuv": None} if torch is None else _try_torch(torch)
    except BaseException as error:
        result = {"ready": False, "why": f"{type(error).__name__}: {error}"[:1000]}
    os.write(writable, json.dumps(result).encode())
    os._exit(0)


def _try_torch(torch: Any) -> dict[str, Any]:
    if torch.cuda._is_in_bad_fork():
        return {"ready": False, "why": "importing the preloaded modules initialized CUDA"}
    ones = torch.ones(512, 512, requires_grad=True)
    (ones @ ones).relu().sum().backward()
    torch.ones(1 << 20).sum().item()
    return {"ready": True, "libuv": _has_libuv(torch)}


def _has_libuv(torch: Any) -> bool:
    """Whether torch's TCPStore client accepts its own default: some distributions build without libuv."""
    if not torch.distributed.is_available():
        return True
    from datetime import timedelta

    try:
        torch.distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(milliseconds=1), use_libuv=True)
    except Exception as error:
        return "libuv" not in str(error)
    return True

"""Import modules in a process that will fork, and test that its forks work afterwards."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elasticjob._runtime.agent.processes import open_files
from elasticjob._runtime.agent.start_workers.fork_server.gpu_count import count_gpus_in_forks

SELF_TEST_TIMEOUT = 20.0
"""Seconds. The test takes milliseconds, but other pods on the same cores may be importing."""
PROCESS = Path("/proc/self")
"""The folder that describes this process."""
NVML_DEVICE = "/dev/nvidiactl"
"""The one device that `nvmlInit` of older drivers leaves open; newer ones leave a thread and other devices too."""
_IMPORT_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With these, numpy's OpenBLAS starts no thread, and `torch.cuda.is_available()` creates no CUDA state."""


@contextmanager
def import_environment() -> Iterator[None]:
    """Set the environment for imports; restore the previous one at the end."""
    previous = {name: os.environ.get(name) for name in _IMPORT_ENVIRONMENT}
    os.environ.update(_IMPORT_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def no_garbage_collections() -> Iterator[None]:
    """Suspend automatic garbage collections during imports: nearly all that imports create stays.

    They would look at all of it again and again, which takes a sixth of the import of torch and torch._dynamo. A
    threshold that an import sets stays.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)


def import_modules(modules: list[str]) -> list[str]:
    """Import modules. Return `module: reason` for each that cannot be imported; this is not an error."""
    missing = []
    with count_gpus_in_forks() as gpus:
        for name in modules:
            try:
                importlib.import_module(name)
            except BaseException as error:
                missing.append(f"{name}: {type(error).__name__}: {error}")
            gpus.replace_torchs()
    return missing


def check_threads() -> dict[str, Any] | None:
    """Return a failure if threads run. A fork has none of them, and the locks that they hold stay locked there."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if not others:
        return None
    python = {t.native_id: t.name for t in threading.enumerate()}
    names = ", ".join(sorted({python.get(int(task.name)) or _thread_name(task) for task in others}))
    threads = f"{len(others)} thread{'' if len(others) == 1 else 's'}: {names}"
    return {"ready": False, "reason": f"importing the preloaded modules started {threads}"}


def _thread_name(task: Path) -> str:
    """Return the name that a thread has in the kernel: native libraries name theirs after their purpose."""
    with suppress(OSError):
        return (task / "comm").read_text(errors="replace").strip()
    return "ended"


def check_gpus() -> dict[str, Any] | None:
    """Return a failure if this process uses a GPU: neither CUDA's driver nor an open device works after a fork."""
    use = find_gpu_use()
    return {"ready": False, "reason": f"importing the preloaded modules {use}"} if use else None


def find_gpu_use() -> str:
    """Return how this process uses a GPU; empty if it does not."""
    opened = {path for path in open_files(PROCESS).values() if path.startswith("/dev/nvidia")} - {NVML_DEVICE}
    if opened:
        return f"opened {', '.join(sorted(opened))}"
    return "initialized CUDA's driver" if any(map(is_initialized, _load_again(cuda_drivers(PROCESS)))) else ""


def cuda_drivers(process: Path) -> set[str]:
    """Return the paths of CUDA's driver in the memory of a process; `process` is its folder in /proc."""
    with suppress(OSError):
        paths = {
            line.rstrip().rsplit(" ", 1)[-1] for line in (process / "maps").read_text(errors="replace").splitlines()
        }
        return {path for path in paths if os.path.basename(path).startswith("libcuda.so")}  # noqa: PTH119
    return set()


def is_initialized(driver: Any) -> bool:
    """Return whether `cuInit` has succeeded in this process: this call fails before. `driver`: a ctypes.CDLL."""
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def _load_again(paths: Iterable[str]) -> Iterator[Any]:
    for path in paths:
        with suppress(OSError):  # its file has been replaced
            yield ctypes.CDLL(path)


def run_self_test() -> dict[str, Any]:
    """Fork, compute in parallel in the fork, and return the result.

    The fork hangs for ever if an import has entered an OpenMP region before the fork.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _test_fork(writable)
    os.close(writable)
    answered, _, _ = select.select([readable], [], [], SELF_TEST_TIMEOUT)
    answer = os.read(readable, 4096) if answered else b""
    os.close(readable)
    if not answer:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not answered:
        reason = f"a forked process hung in its first parallel operation ({SELF_TEST_TIMEOUT:g} s)"
        return {"ready": False, "reason": reason}
    if not answer:
        return {"ready": False, "reason": "a forked process died in its first parallel operation"}
    result: dict[str, Any] = json.loads(answer)
    return result


def _test_fork(writable: int) -> None:
    """In the fork: compute, write the result, and end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        torch = sys.modules.get("torch")
        result = {"ready": True, "libuv": None} if torch is None else _test_torch(torch)
    except BaseException as error:
        result = {"ready": False, "reason": f"{type(error).__name__}: {error}"[:1000]}
    os.write(writable, json.dumps(result).encode())
    os._exit(0)


def _test_torch(torch: Any) -> dict[str, Any]:
    """Compute in parallel on the CPU."""
    if torch.cuda._is_in_bad_fork():
        return {"ready": False, "reason": "importing the preloaded modules initialized CUDA"}
    ones = torch.ones(512, 512, requires_grad=True)
    (ones @ ones).relu().sum().backward()
    torch.ones(1 << 20).sum().item()
    return {"ready": True, "libuv": _has_libuv(torch)}


def _has_libuv(torch: Any) -> bool:
    """Return whether torch's TCPStore client accepts libuv, its default: some distributions build without it."""
    if not torch.distributed.is_available():
        return True
    from datetime import timedelta

    try:
        torch.distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(milliseconds=1), use_libuv=True)
    except Exception as error:
        return "libuv" not in str(error)
    return True

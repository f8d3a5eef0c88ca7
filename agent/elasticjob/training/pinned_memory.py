"""Memory that is registered with CUDA's driver, to which copies from a GPU are several times as fast.

`cudaHostRegister` takes about half a second for each GiB, so a thread does it while the training goes on. Until then,
and if the driver or a limit refuses, the memory is plain: copies are slower, and otherwise the same. One H100 copied
14.5 GB/s to plain and 54.9 GB/s to registered memory of a mapping like those here; this module has not run on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from elasticjob.training.update_guard import guard

SMALLEST = 16 << 20
"""Bytes from which a mapping is registered: less takes milliseconds to copy anyway."""
SHARE = 0.5
"""Of the memory that the container may use: the kernel can neither move nor reclaim what is registered."""
END_TIMEOUT = 5.0
"""Seconds in which the driver must give up a mapping. After that it stays mapped until the process ends."""
_PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of this process."""
_CAP_IPC_LOCK = 1 << 14
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container sees its own limit, with version 2 and 1 of cgroups."""

_lock = threading.Lock()
registered_bytes = 0
refusal_reported = False


class Registration:
    """One mapping, which a thread registers, and unregisters once `end` is called.

    The same thread does both: CUDA keeps the error of a failed call for the thread that made it, and the next kernel
    that this thread launches would report it.
    """

    def __init__(self, memory: mmap.mmap, runtime: Any, device: int) -> None:
        """`runtime`: `torch.cuda.cudart()`. `device`: one that has a context."""
        self._pid = os.getpid()
        self._end = threading.Event()
        self._ended = threading.Event()
        self.settled = threading.Event()
        """Set once the memory is registered, or stays plain."""
        arguments = (memory, runtime, device)
        # A daemon: it waits for most of the time, and the process must not wait for it.
        thread = threading.Thread(target=self._run, args=arguments, name="elasticjob-register", daemon=True)
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with guard.section() if is_main else nullcontext():  # an interrupted start of a thread may block all others
                thread.start()
        except RuntimeError:  # no more threads
            _count(-len(memory))
            self.settled.set()
            self._ended.set()

    def end(self, timeout: float = END_TIMEOUT) -> None:
        """Unregister the memory, before it is unmapped or its file gets another size."""
        if self._pid == os.getpid():  # a fork has neither the thread nor a device
            self._end.set()
            self._ended.wait(timeout)

    def _run(self, memory: mmap.mmap, runtime: Any, device: int) -> None:
        """In the thread. It refers to the mapping, so that this stays mapped while the driver uses it."""
        try:
            error = _call(runtime, device, "cudaHostRegister", _address(memory), len(memory), _PORTABLE)
            if error:
                _report(f"the driver does not register memory ({error})")
            self.settled.set()
            self._end.wait()
            if not error:
                _call(runtime, device, "cudaHostUnregister", _address(memory))
        finally:
            _count(-len(memory))
            self.settled.set()
            self._ended.set()


def register(memory: mmap.mmap) -> Registration | None:
    """Begin to register a mapping, and return what ends that; None if it stays plain memory.

    It never initializes CUDA: that takes seconds and device memory. A refusal is reported once, to stderr.
    """
    torch = sys.modules.get("torch")
    device = _device_in_use(torch)
    if torch is None or device is None or len(memory) < SMALLEST:
        return None
    if problem := pinning_refusal(len(memory), registered_bytes, lockable_bytes(), usable_bytes()):
        _report(problem)
        return None
    _count(len(memory))
    return Registration(memory, torch.cuda.cudart(), device)


def wait_for_copies(devices: Iterable[Any]) -> None:
    """Wait until the copies that this thread has queued on these devices are done."""
    for device in devices:
        if device.type == "cuda":
            sys.modules["torch"].cuda.current_stream(device).synchronize()


def pinning_refusal(size: int, registered: int, lockable: int | None, usable: int) -> str:
    """Return why a mapping may not be registered; empty if it may. Pure.

    All are bytes. `lockable`: None if nothing limits locked memory. `usable`: what the container may use.
    """
    wanted = registered + size
    if lockable is not None and wanted > lockable:
        return (
            f"{_text(wanted)} exceed the limit of locked memory (RLIMIT_MEMLOCK), which is {_text(lockable)}: "
            "raise it, or give the container the capability IPC_LOCK"
        )
    if wanted > SHARE * usable:
        return f"{_text(wanted)} are more than half of the {_text(usable)} of memory that the container may use"
    return ""


def lockable_bytes() -> int | None:
    """Return how much memory this process may lock; None if that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
        capabilities = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
        if int(capabilities, 16) & _CAP_IPC_LOCK:
            return None
    return None if limit == resource.RLIM_INFINITY else limit


def usable_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this container may use: its limit, or all memory of the Node."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # no such version of cgroups; no limit
            found = min(found, int((root / name).read_text()))
    return found


def _device_in_use(torch: Any) -> int | None:
    """Return a CUDA device on which this process has a context, the current one if it has; None without any."""
    if torch is None or not torch.cuda.is_initialized():
        return None
    current: int = torch.cuda.current_device()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or has_context(current):
        return current
    return next(filter(has_context, range(torch.cuda.device_count())), None)


def _call(runtime: Any, device: int, name: str, *arguments: int) -> str:
    """Call a function of the runtime; return its error, empty if there is none."""
    try:
        # A new thread is on the first device, where it would get a context of its own, and memory for that.
        sys.modules["torch"].cuda.set_device(device)
        code = int(getattr(runtime, name)(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{name} returns error {code}" if code else ""


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _count(size: int) -> None:
    global registered_bytes
    with _lock:
        registered_bytes += size


def _report(problem: str) -> None:
    """Report the first refusal of this process."""
    global refusal_reported
    if not refusal_reported:
        refusal_reported = True
        sys.stderr.write(f"elasticjob: commits copy to plain memory, which is slower: {problem}\n")


def _text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"

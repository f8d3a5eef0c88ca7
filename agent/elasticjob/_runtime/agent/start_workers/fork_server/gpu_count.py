"""Answer `torch.cuda.device_count()` during imports without initializing CUDA here: ask in a throw-away fork.

Many libraries ask at their import. In the process itself the answer costs its forks: current drivers leave a thread
and open devices behind (seen with 580), also after NVML's own `nvmlInit`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GpuCount:
    """Replaces `torch.cuda.device_count`, which `torch.cuda.is_available` asks too."""

    def __init__(self) -> None:
        self._active = True
        """Modules may keep the replacement: it calls torch's own function once the imports are over."""

    def replace_torchs(self) -> None:
        """Replace torch's function if torch is imported by now."""
        cuda = sys.modules.get("torch.cuda")
        count = getattr(cuda, "device_count", None)
        if cuda is None or count is None or hasattr(count, "__wrapped__"):
            return

        @functools.wraps(count)
        def counted() -> int:
            return _ask_fork(count) if self._active else int(count())

        cuda.device_count = counted  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Give torch its own function back."""
        self._active = False
        cuda = sys.modules.get("torch.cuda")
        replaced = getattr(cuda, "device_count", None)
        if cuda is not None and (own := getattr(replaced, "__wrapped__", None)) is not None:
            cuda.device_count = own  # type: ignore[attr-defined]


@contextmanager
def count_gpus_in_forks() -> Iterator[GpuCount]:
    """Let forks count GPUs meanwhile. Call `replace_torchs` again once torch may have been imported."""
    gpus = GpuCount()
    gpus.replace_torchs()
    try:
        yield gpus
    finally:
        gpus.restore()


def _ask_fork(count: Callable[[], int]) -> int:
    """Return what `count` returns in a fork of this process; 0 if it fails there."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, str(int(count())).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return int(answer or 0)

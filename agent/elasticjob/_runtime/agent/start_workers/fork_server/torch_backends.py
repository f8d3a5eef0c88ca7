"""In the fork server: let torch find its backend for CPUs ahead of need."""

from __future__ import annotations

import sys
from contextlib import suppress

EARLY = ("gloo",)
"""nccl is left alone: an environment variable that the script may set decides which implementation it is."""


def find_backends() -> None:
    """Do what the first process group of each worker would do for gloo, if torch is imported.

    From torch 2.15 on, torch reads the metadata of all installed packages to find out who provides a backend: 7 ms of
    processor time with 120 packages, in each new process, while the other ranks wait for it.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    find = getattr(getattr(c10d, "Backend", None), "_ensure_backend_registered", None)
    if find is None:
        return
    for name in EARLY:
        with suppress(Exception):  # the script will see it by itself
            find(name)

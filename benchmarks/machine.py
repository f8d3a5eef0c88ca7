"""Describe the machine, without anything that identifies it."""

from __future__ import annotations

import os
import platform
import time


def describe() -> dict[str, object]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory:.0f} GiB",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        "day": time.strftime("%Y-%m-%d"),
        "load before": round(os.getloadavg()[0], 1),
    }

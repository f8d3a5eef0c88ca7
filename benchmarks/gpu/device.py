"""The device that all ranks of a job share: a GPU, or the CPU in a rehearsal.

Scripts import this first. `python -m benchmarks.gpu.device` prints which one it is.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import sys
import time

# NCCL accepts ranks that share a GPU if they claim to be on different hosts. It reads the name once in a process, at
# its first group, which a spare process has before its function. The rank is no such name: in another round the process
# may have another one.
os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def init_group() -> None:
    """Create the default process group on the device."""
    if CUDA:
        os.environ["NCCL_HOSTID"] = str(os.getpid())  # a fork server may have imported this module
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        dist.init_process_group("gloo")
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def synchronize() -> None:
    """Wait until the device has done all queued work."""
    if CUDA:
        torch.cuda.synchronize()


def write_line(text: str) -> None:
    """Write one line with one call: ranks share a pipe."""
    os.write(1, f"{text}\n".encode())


def describe() -> dict[str, object]:
    """Return what the figures depend on, without anything that identifies the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "device": torch.cuda.get_device_name(0) if CUDA else "CPU",
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory:.0f} GiB",
        "torch": torch.__version__.partition("+")[0],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if CUDA else "",
        "python": platform.python_version(),
        "day": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Print the description as JSON; without a GPU, return 1 and say why on stderr."""
    if sys.argv[1:] != ["--cpu"] and not CUDA:
        try:
            torch.cuda.init()
        except Exception as error:
            print(f"torch {torch.__version__} can use no GPU here ({error})", file=sys.stderr)
        return 1
    print(json.dumps(describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

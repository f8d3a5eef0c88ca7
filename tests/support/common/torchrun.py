"""Stock torchruns as child processes: several nodes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.common.child_process import ChildProcess

WORKER = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
line = " ".join(["trains", *(os.environ[n] for n in names), str(os.getpid())])
os.write(1, f"{line}\\n".encode())  # one write: the workers of a node share a pipe
while one.item() > 0:
    # Rank 0 checks the file for all ranks, so that all stop at the same step.
    one.fill_(0 if dist.get_rank() == 0 and os.path.exists(sys.argv[1]) else 1)
    dist.broadcast(one, 0)
    time.sleep(0.01)
dist.destroy_process_group()
"""
"""Trains until the file in its first argument exists. Prints its ranks and its process id first."""


class Torchrun(ChildProcess):
    """One node: one `torchrun` in a session of its own."""

    def __init__(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "torch.distributed.run"),
    ) -> None:
        command = [sys.executable, *program, *arguments]
        super().__init__(command, env={**os.environ, **(environ or {})}, new_session=True)


def script(folder: Path) -> Sequence[str]:
    """Write the worker script and return its arguments: the script and the file that ends it."""
    (folder / "worker.py").write_text(WORKER)
    return [str(folder / "worker.py"), str(folder / "done")]

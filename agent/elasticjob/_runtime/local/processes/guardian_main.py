"""The program of the guardian of a local run. Until the run has ended it is an interpreter without further modules."""

from __future__ import annotations

import os
import sys

ENDED = b"\0"
"""What a run writes that has ended its processes itself."""


def main(arguments: list[str]) -> None:
    """Wait for the end of a run. Arguments: the descriptor of the pipe from it, its id and its folder."""
    descriptor, run_id, scratch = arguments
    if os.read(int(descriptor), 1) == ENDED:
        return
    import asyncio  # now: it would slow the start of the run down
    import shutil

    from elasticjob._runtime.local.processes.leftovers import end_leftovers

    if alive := asyncio.run(end_leftovers(run_id)):
        pids = ", ".join(map(str, sorted(alive)))
        sys.stderr.write(f"elasticjob run was killed; these of its processes are alive after SIGKILL: {pids}\n")
    shutil.rmtree(scratch, ignore_errors=True)

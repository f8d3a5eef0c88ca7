"""Run the user's torchrun in a fork of the fork server, with its slow start-up and shutdown shortened because every
rank waits for them."""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from elasticjob._runtime.agent.start_workers.command import TORCHRUN_MODULES
from elasticjob._runtime.agent.start_workers.fork_server import run_main
from elasticjob._runtime.system.process_end import end_without_destructors


def runs_torchrun(command: run_main.Program) -> bool:
    """Return whether the program is torchrun itself."""
    return command.mode == "module" and command.target in TORCHRUN_MODULES


def run_torchrun(command: run_main.Program) -> NoReturn:
    """Run torchrun as `run_main.run_program` does, but end the process at once also after success."""
    _name_frames()
    with suppress(SystemExit):
        run_main.run_program(command)
    end_without_destructors(0)


def _name_frames() -> None:
    """Record in `inspect` that the frames below torchrun's belong to no module.

    torchrun's rendezvous inspects the stack at each operation, to get the name of a method. For each frame with an
    unknown module, `inspect` searches all modules, thousands here: 0.2 to 0.4 CPU seconds of a start.
    """
    frame: FrameType | None = sys._getframe()
    files = {run_main.__file__, "<frozen runpy>"}
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    known: dict[str, str] = getattr(inspect, "modulesbyfile", {})
    for file in files:
        known[file] = known[os.path.abspath(file)] = ""  # noqa: PTH100

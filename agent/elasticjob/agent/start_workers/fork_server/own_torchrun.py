"""In a fork of the warm process: be a torchrun that costs the nodes, which wait for its start and its end, little."""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from elasticjob.agent.start_workers.command import TORCHRUN_MODULES
from elasticjob.agent.start_workers.fork_server import run_main


def runs_torchrun(command: run_main.Program) -> bool:
    """Whether it is torchrun itself, and not a script."""
    return command.mode == "module" and command.target in TORCHRUN_MODULES


def run_torchrun(command: run_main.Program) -> NoReturn:
    """Run it as `run_main` does, but leave at once also where it succeeds."""
    _name_frames()
    with suppress(SystemExit):
        run_main.run_program(command)
    run_main.end_at_once(0)


def _name_frames() -> None:
    """Tell `inspect` that the frames below torchrun's belong to no module.

    Its rendezvous asks for the stack at each operation, only for the name of a method, and `inspect` looks through
    all modules, thousands here, for each frame whose module it does not know: 0.2 to 0.4 CPU seconds of a start.
    """
    frame: FrameType | None = sys._getframe()
    files = {run_main.__file__, "<frozen runpy>"}
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    known: dict[str, str] = getattr(inspect, "modulesbyfile", {})
    for file in files:
        known[file] = known[os.path.abspath(file)] = ""  # noqa: PTH100

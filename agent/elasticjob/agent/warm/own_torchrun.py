"""In a fork of the warm process: be a torchrun that costs the nodes, which wait for its start and its end, little."""

from __future__ import annotations

import inspect
import os
import sys
from types import FrameType

from elasticjob.agent.warm import run_main

_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def is_torchrun(command: run_main.Command) -> bool:
    """Whether it is torchrun itself, and not a script."""
    return command.mode == "module" and command.target in _MODULES


def run(command: run_main.Command) -> None:
    """Run it as `run_main` does, but leave without taking Python apart: in a fork that takes seconds. Never returns."""
    _name_frames()
    code: object = None
    try:
        run_main.run(command)
    except SystemExit as end:
        code = end.code
    if not isinstance(code, (int, type(None))):
        print(code, file=sys.stderr)
    run_main.clean_up()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


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

"""The end of a worker's process without Python's finalization, which takes seconds with torch."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, NoReturn


def end_at_once(status: int) -> NoReturn:
    """End the process without Python's finalization, which costs a fork with torch 1.3 CPU seconds of the recovery.

    Output is complete: this waits for threads, runs atexit functions, and flushes files that the program left open.
    Destructors do not run, nor do exit handlers of native libraries.
    """
    clean_up()
    os._exit(status)


def end_outdated_process() -> None:
    """End a spare process whose objects may be of an old checkpoint, so that a new one begins with the script."""
    text = (
        "elasticjob: all processes that had the training state are lost, and this spare process may have read an older"
        f" checkpoint than there is now: a new process replaces {os.getpid()}\n"
    )
    os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def clean_up() -> None:
    """Do what Python does at its end before its finalization."""
    atexit.unregister(gc.unfreeze)
    _leave_out_exit_functions_of_torch()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for item in (sys.stdout, sys.stderr, *gc.get_objects()):  # objects since the fork: older ones are frozen
        if issubclass(type(item), io.IOBase):
            with suppress(Exception):
                item.flush()


def _leave_out_exit_functions_of_torch() -> None:
    """Unregister those that show nothing: the others of a planned end wait for this process.

    Modules of torch take back the operators that they have defined (37 ms), and torch._dynamo makes a table that it
    logs at level INFO (3 ms).
    """
    for finalizer in tuple(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if (dump := getattr(dynamo, "dump_compile_times", None)) and not dynamo.log.isEnabledFor(logging.INFO):
        atexit.unregister(dump)

"""The end of a worker's process without Python's finalization, which takes seconds with torch."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from typing import Any, NoReturn

from elasticjob._runtime.system.program_objects import destroy_program_objects, flush_files

CLEAN_UP_TIMEOUT = 300.0
"""Seconds that closing the program's files may take, after its exit functions. On slow storage the last writes of large
files take long."""


def end_at_once(status: int) -> NoReturn:
    """End the process without Python's finalization, which costs 1.3 CPU seconds in a fork with torch.

    The output of the program is complete: this waits for its threads, runs its atexit functions, and destroys its
    objects, so that its files are closed and its destructors run. The destructors of libraries and the exit handlers of
    native libraries do not run.
    """
    try:
        _run_exit_functions()
        # A thread of the script may keep a file busy for ever, and the other ranks would wait for this process.
        threading.Thread(target=_exit_late, args=(status,), daemon=True, name="elasticjob-end").start()
        destroy_program_objects()
    except BaseException:  # an error at the end of the script does not change the exit code, as in Python
        with suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(status)


def _exit_late(status: int) -> None:
    time.sleep(CLEAN_UP_TIMEOUT)
    os.write(2, f"elasticjob: the end of process {os.getpid()} takes longer than {CLEAN_UP_TIMEOUT:g} s\n".encode())
    os._exit(status)


def end_without_destructors(status: int) -> NoReturn:
    """End a process of elasticjob's own like `end_at_once`, but destroy no objects: others wait for this end."""
    _run_exit_functions()
    flush_files()
    os._exit(status)


def end_outdated_process() -> None:
    """End a spare process whose objects may come from an old checkpoint: a new process runs the script again."""
    text = (
        "elasticjob: all processes that had the training state are lost, and this spare process may have read an older"
        f" checkpoint than there is now: a new process replaces {os.getpid()}\n"
    )
    os.write(2, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def clean_up() -> None:
    """Do what Python does at its end, except for the destruction of libraries."""
    _run_exit_functions()
    destroy_program_objects()


def _run_exit_functions() -> None:
    atexit.unregister(gc.unfreeze)
    _leave_out_exit_functions_of_torch()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _leave_out_exit_functions_of_torch() -> None:
    """Unregister exit functions of torch without a visible effect: in a planned end, other ranks wait for this process.

    Modules of torch remove the operators that they have defined (37 ms), and torch._dynamo computes a table that it
    logs only at level INFO (3 ms).
    """
    for finalizer in tuple(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if (dump := getattr(dynamo, "dump_compile_times", None)) and not dynamo.log.isEnabledFor(logging.INFO):
        atexit.unregister(dump)

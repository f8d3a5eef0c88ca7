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
"""Seconds that it may take to close the program's files, after its exit functions. The last writes of large files take
long on slow storage."""


def end_at_once(status: int) -> NoReturn:
    """End the process without Python's finalization, which costs a fork with torch 1.3 CPU seconds of the recovery.

    Output is complete: this waits for threads, runs atexit functions, and destroys the objects of the program, so that
    its files are closed and its destructors run. Destructors of libraries do not run, nor do exit handlers of native
    ones.
    """
    try:
        _run_exit_functions()
        # A thread of the script may hold a file for ever that is to be closed: the others would wait for this process.
        threading.Thread(target=_exit_late, args=(status,), daemon=True, name="elasticjob-end").start()
        destroy_program_objects()
    except BaseException:  # what the script does at its end changes no exit code, as in Python
        with suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(status)


def _exit_late(status: int) -> None:
    time.sleep(CLEAN_UP_TIMEOUT)
    os.write(2, f"elasticjob: the end of process {os.getpid()} takes longer than {CLEAN_UP_TIMEOUT:g} s\n".encode())
    os._exit(status)


def end_without_destructors(status: int) -> NoReturn:
    """End a process of elasticjob's own as `end_at_once` does, but with its objects: others wait for this end."""
    _run_exit_functions()
    flush_files()
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
    """Do what Python does at its end, except for the destruction of libraries."""
    _run_exit_functions()
    destroy_program_objects()


def _run_exit_functions() -> None:
    atexit.unregister(gc.unfreeze)
    _leave_out_exit_functions_of_torch()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


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

"""Threads of elasticjob in a worker's process, whose main thread runs the script."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from elasticjob._runtime.contract.names import ExitCode


class MonitorOfWorker(threading.Thread):
    """A daemon thread that must not end by an error, because the process depends on what it watches.

    Python would print the error, and nothing would break the collective in which the main thread waits for ever. The
    process ends instead, with `ExitCode.INTERNAL`, and a new one takes its place.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._watch = target

    def run(self) -> None:
        try:
            self._watch()
        except BaseException:
            with suppress(Exception):  # the script may have closed or replaced it
                sys.stderr.write(f"elasticjob: thread {self.name} has failed: process {os.getpid()} ends\n")
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(ExitCode.INTERNAL)

"""A thread of elasticjob that fails in a worker ends the process, instead of leaving the main thread alone."""

from __future__ import annotations

import subprocess
import sys

from elasticjob._runtime.contract.names import ExitCode
from elasticjob._runtime.system.code_root import CODE_ROOT

WAITS_FOR_EVER = f"""
import sys, threading
sys.path.insert(0, {CODE_ROOT!r})
from elasticjob.inprocess._threads.own_thread import MonitorOfWorker

def watch():
    raise ValueError("the agent sent nonsense")

MonitorOfWorker(watch, "elasticjob-monitor").start()
threading.Event().wait()
"""


def test_a_process_whose_monitor_thread_fails_ends_and_shows_the_error() -> None:
    argv = [sys.executable, "-c", WAITS_FOR_EVER]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.INTERNAL
    assert "thread elasticjob-monitor has failed" in done.stderr
    assert done.stderr.endswith("ValueError: the agent sent nonsense\n")

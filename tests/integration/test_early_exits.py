"""A worker's end is known, and its successor runs, before the agent can reap it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.agent.worker_scripts import script
from support.common.processes import state_of
from support.local.run import LocalRun, manifest

WAITS = """
import os, sys, threading, time
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
held = bytearray(os.urandom(1 << 20) * 300)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(f"restart {restart} rank {rank} pid {os.getpid()}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
PTRACE_SEIZE = 0x4206


@contextmanager
def not_to_be_reaped(pid: int) -> Iterator[None]:
    """Trace a process, which goes on: its parent cannot reap it before the end of this context.

    The process must have ended then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    yield
    os.waitpid(pid, 0)


def test_a_job_goes_on_before_a_killed_worker_is_reaped(tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = manifest([*script(tmp_path, WAITS), str(done)], replicas=2, preload=["json"])
    with LocalRun(job, tmp_path) as run:
        found = (run.wait_for(r"restart 0 rank (\d) pid (\d+)") for _ in range(2))
        pid = {match[1]: int(match[2]) for match in found}["1"]
        with not_to_be_reaped(pid):
            os.kill(pid, signal.SIGKILL)
            run.wait_for(r"round \S+ ends: worker failure on toy-1-0")
            assert {run.wait_for(r"restart 1 rank (\d)")[1] for _ in range(2)} == {"0", "1"}
            assert state_of(pid) == "Z", "the agent has not reaped it"
        done.touch()
        assert run.exit_code() == 0

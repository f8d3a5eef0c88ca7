"""A worker whose resource tracker cleans up only when the test lets it."""

from __future__ import annotations

CODE = """
import os, signal, subprocess, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

TRACKER = '''
from multiprocessing.resource_tracker import main
import os, sys, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
main(int(sys.argv[1]))
'''

def create(gate):
    # As multiprocessing starts its tracker, except for the gate: the tracker ignores these signals once it runs.
    ignored = signal.SIGINT, signal.SIGTERM
    read, write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    tracker = subprocess.Popen([sys.executable, "-c", TRACKER, str(read), gate], pass_fds=[read])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    os.close(read)
    resource_tracker._resource_tracker._fd = write
    resource_tracker._resource_tracker._pid = tracker.pid
    memory = SharedMemory(create=True, size=100)
    print(f"worker {os.getpid()} tracker {tracker.pid} memory {memory.name}", flush=True)
"""
"""`create(gate)` creates shared memory and prints `worker PID tracker PID memory NAME`. When the worker has ended, the
tracker removes the memory as soon as the file `gate` exists."""

"""What is known of a process that exits, or seems to, before it can be reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elasticjob._runtime.agent.monitoring.exits import fast_exit
from elasticjob._runtime.agent.monitoring.exits.fast_exit import FastExits
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.robust_mutex import HeldMutex, MutexMemory, mutex_memory
from support.common.processes import state_of

EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""Number of the system call that ends one thread."""
HOLDS = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from elasticjob._runtime.system.robust_mutex import MutexMemory, mutex_memory
MutexMemory(int(sys.argv[2])).try_hold(int(sys.argv[3]))
print("ready", flush=True)
"""
SLEEPS = "time.sleep(600)"
READS = "sys.stdin.readline()\n"
FORKS = """
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


class Process:
    """A process that holds a mutex, and what is reported of it."""

    def __init__(self, program: str) -> None:
        descriptor = mutex_memory()
        assert descriptor is not None
        memory = MutexMemory(descriptor)
        self.number = memory.reserve(1)[0] or 0
        self.mutex = HeldMutex(memory, self.number)
        arguments = [CODE_ROOT, str(descriptor), str(self.number)]
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDS + program, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(descriptor,),
        )  # fmt: skip
        os.close(descriptor)
        assert self.read_line() == "ready"
        self.reports: list[tuple[int, int]] = []
        self.exits = FastExits(lambda pid, code: self.reports.append((pid, code)))
        self.exits.watch(self.child.pid, self.mutex)

    def read_line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def send_line(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    @property
    def watched(self) -> bool:
        """Whether the thread that waits for its mutex runs."""
        return any(thread.name == f"exit-of-{self.child.pid}" for thread in threading.enumerate())

    async def reported(self) -> int:
        await until(lambda: bool(self.reports))
        ((pid, code),) = self.reports
        assert pid == self.child.pid
        return code

    async def given_up(self) -> None:
        await until(lambda: not self.watched)
        await asyncio.sleep(0)  # a report would be in the event loop's queue
        assert self.reports == []


@contextmanager
def process(program: str) -> Iterator[Process]:
    made = Process(program)
    try:
        yield made
    finally:
        made.child.kill()
        made.child.communicate()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("os._exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), 15)", -15),
        ("os.kill(os.getpid(), 9)", -9),
        ("for _ in range(30): threading.Thread(target=time.sleep, args=(600,)).start()\nos.kill(os.getpid(), 9)", -9),
        ("threading.Thread(target=os._exit, args=(5,)).start()\ntime.sleep(600)", 5),
        ("import ctypes\nctypes.CDLL(None).prctl(4, 0)\nos.kill(os.getpid(), 9)", -9),
    ],
    ids=["success", "exit", "exception", "SIGTERM", "SIGKILL", "threads", "exit of a thread", "not dumpable"],
)
async def test_a_process_that_exits_is_reported_before_it_is_reaped(program: str, code: int) -> None:
    with process(READS + program) as watched:
        watched.send_line()
        assert await watched.reported() == code
        assert watched.child.returncode is None, "it is not reaped yet"
        assert watched.child.wait() == code


async def test_a_process_that_executes_another_program_goes_on() -> None:
    with process(READS + "os.execv('/bin/cat', ['cat'])") as watched:
        watched.send_line()
        await watched.given_up()
        watched.send_line()
        assert watched.read_line() == "", "cat answers"
        assert watched.child.poll() is None


async def test_a_process_whose_main_thread_ends_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_exit, "POLL_DELAYS", (0.0, 0.01))
    thread = "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    with process(f"{thread}{READS}import ctypes\nctypes.CDLL(None).syscall({EXIT}, 0)") as watched:
        watched.send_line()
        await watched.given_up()
        assert watched.child.poll() is None


async def test_a_child_of_the_process_does_not_count() -> None:
    with process(FORKS) as watched:
        child = int(watched.read_line())
        os.kill(child, signal.SIGKILL)
        await until(lambda: state_of(child) == "Z")
        assert watched.watched
        watched.child.kill()
        assert await watched.reported() == -9


async def test_a_process_is_reported_while_its_child_runs() -> None:
    with process(FORKS) as watched:
        child = int(watched.read_line())
        watched.child.kill()
        try:
            assert await watched.reported() == -9
            assert state_of(child) in ("R", "S", "D")
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_process_that_has_been_reaped_is_not_reported() -> None:
    with process(SLEEPS) as watched:
        watched.exits.forget(watched.child.pid)
        watched.child.kill()
        await watched.given_up()


async def test_a_process_without_the_mutex_is_not_waited_for() -> None:
    with process(SLEEPS) as watched:
        (number,) = watched.mutex.memory.reserve(1)
        assert number is not None
        assert not HeldMutex(watched.mutex.memory, number).wait(watched.child.pid)
        assert not watched.mutex.wait(watched.child.pid + 1), "another process holds it"


def test_numbers_are_not_used_again_at_once_also_by_processes_that_share_the_memory() -> None:
    descriptor = mutex_memory()
    assert descriptor is not None
    one, other = MutexMemory(descriptor), MutexMemory(descriptor)
    os.close(descriptor)
    numbers = [number for _ in range(3) for memory in (one, other) for number in memory.reserve(2)]
    assert len(set(numbers)) == len(numbers)


FORKS_WITHOUT_END = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from elasticjob._runtime.system import robust_mutex
from elasticjob._runtime.system.robust_mutex import HeldMutex, MutexMemory, mutex_memory

robust_mutex.MEMORY_SIZE = 4096  # 63 mutexes
memory = MutexMemory(mutex_memory())


def fork(number):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        memory.try_hold(number)
        os.write(write, b"held")
        signal.pause()
    os.read(read, 4)
    os.close(read), os.close(write)
    return child


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


(first,) = memory.reserve(1)
stays = fork(first)
numbers = []
for _ in range(100):
    pair = memory.reserve(2)
    for number, child in [(number, fork(number)) for number in pair]:
        os.kill(child, signal.SIGKILL)
        assert memory.wait(number, child)
        os.waitpid(child, 0)
    numbers += pair
assert first not in numbers and None not in numbers, numbers
assert all(len(set(numbers[i : i + 60])) == 60 for i in range(140))

# A process that is watched, and whose mutex another one holds by the time that its end is looked at, has ended.
again = next(iter(numbers[-60:]))
holders = {number: fork(number) for number in numbers[-62:]}
assert not memory.wait(again, stays), "another process holds it"
assert memory.reserve(2) == [None, None], "all are held"
for child in (stays, *holders.values()):
    end(child)
assert len(set(memory.reserve(63))) == 63
print("done")
"""


def test_the_mutexes_of_processes_that_have_ended_are_used_again() -> None:
    argv = [sys.executable, "-c", FORKS_WITHOUT_END, CODE_ROOT]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


WATCHES_AND_ENDS = (
    HOLDS.partition("MutexMemory(int")[0]
    + """
import asyncio
from elasticjob._runtime.agent.monitoring.exits.fast_exit import FastExits
from elasticjob._runtime.system.robust_mutex import HeldMutex

async def main():
    descriptor = mutex_memory()
    memory = MutexMemory(descriptor)
    (number,) = memory.reserve(1)
    held, holds = os.pipe()
    child = os.fork()
    if child == 0:
        memory.try_hold(number)
        os.write(holds, b"held")
        time.sleep(600)
    print(os.read(held, 4).decode(), end=" ")
    FastExits(lambda pid, code: None).watch(child, HeldMutex(memory, number))
    print(child, threading.active_count(), flush=True)

asyncio.run(main())
"""
)


def test_an_agent_ends_while_its_workers_run() -> None:
    agent = subprocess.Popen([sys.executable, "-c", WATCHES_AND_ENDS, CODE_ROOT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    held, child, threads = agent.stdout.readline().split()
    try:
        assert (held, threads) == ("held", "2")
        assert agent.wait(60) == 0
    finally:
        os.kill(int(child), signal.SIGKILL)
        agent.stdout.close()

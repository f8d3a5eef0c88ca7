"""The copies of a State in memory that is registered with a driver, which a stand-in of torch plays."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticjob._runtime.contract.snapshot_format.state_block import BlockHeader, read_header
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import pinned_memory
from elasticjob.training.snapshot_values.node_copies import COPIES, GRANULE, NodeCopies

WAIT = 30.0
MIB = 1 << 20


class Driver:
    """The part of torch that is used. It fails a test that lets go of memory before it is unregistered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        """What was called, with the MiB of the mapping."""
        self.result: int | Exception = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.contexts = {0}
        self.current = 0
        self.devices: list[tuple[str, int]] = []
        """The device of each call."""
        self.initialized = True
        self.problems: list[str] = []
        self._sizes: dict[int, int] = {}
        self._device = threading.local()
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device in self.contexts)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            current_device=lambda: self.current,
            device_count=lambda: 4,
            set_device=lambda device: setattr(self._device, "number", device),
            cudart=lambda: self,
        )

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.goes_on.wait(WAIT)
        self._check(address, size)
        self.calls.append(("register", size // MIB))
        self.devices.append(("register", getattr(self._device, "number", 0)))
        if isinstance(self.result, Exception):
            raise self.result
        if not self.result:
            self._sizes[address] = size
        return self.result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        size = self._sizes.pop(address)
        self._check(address, size)
        self.calls.append(("unregister", size // MIB))
        return 0

    def _check(self, address: int, size: int) -> None:
        """Note it if the pages of a mapping are not there, or not those of a file that is as long."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= address and address + size <= last:
                return
        self.problems.append(f"{size} bytes at {address:x} are not mapped")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.setattr(pinned_memory, "SMALLEST", MIB)
    monkeypatch.setattr(pinned_memory, "refusal_reported", False)
    monkeypatch.setattr(pinned_memory, "registered_bytes", 0)
    monkeypatch.setattr(pinned_memory, "lockable_bytes", lambda: None)
    yield found
    gc.collect()


def copies(*, is_writer: bool = True) -> NodeCopies:
    return NodeCopies([memory_file(f"test-{i}") for i in range(COPIES)], is_writer=is_writer)


def commit(found: NodeCopies, size: int, number: int = 1) -> int:
    """Write a block and wait until its memory is registered, or is not."""
    descriptor = found.write(BlockHeader(number, number, 2, size), lambda memory: None)
    for registration in found.registered.values():
        assert registration.settled.wait(WAIT)
    assert read_header(descriptor).step == number
    return descriptor


def test_memory_is_registered_once(driver: Driver) -> None:
    found = copies()
    for number in range(1, 7):
        commit(found, 3 * MIB, number)
    assert driver.calls == [("register", 3), ("register", 3)]
    assert pinned_memory.registered_bytes == 6 * MIB


def test_a_block_that_is_a_few_bytes_longer_or_shorter_keeps_its_memory(driver: Driver) -> None:
    found = copies()
    for number, more in enumerate([0, 64, -64, 128, -MIB, 0], 1):
        commit(found, 3 * MIB + 32 + more, number)
    assert driver.calls == [("register", 4), ("register", 4)]


def test_memory_is_unregistered_before_its_size_changes(driver: Driver) -> None:
    found = copies()
    sizes = [3, 3, 9, 9, 2, 2]
    for number, size in enumerate(sizes, 1):
        commit(found, size * MIB, number)
    assert driver.calls == [
        ("register", 3), ("register", 3),
        ("unregister", 3), ("register", 9), ("unregister", 3), ("register", 9),
        ("unregister", 9), ("register", 2), ("unregister", 9), ("register", 2),
    ]  # fmt: skip
    assert driver.problems == []
    assert pinned_memory.registered_bytes == 4 * MIB


def test_memory_is_unregistered_when_a_state_ends(driver: Driver) -> None:
    found = copies()
    commit(found, 3 * MIB)
    del found
    gc.collect()
    assert driver.calls == [("register", 3), ("unregister", 3)]
    assert driver.problems == []
    assert pinned_memory.registered_bytes == 0


def test_a_commit_does_not_wait_for_the_driver_but_new_memory_does(driver: Driver) -> None:
    driver.goes_on.clear()
    found = copies()
    first = found.write(BlockHeader(1, 1, 2, 3 * MIB), lambda memory: None)
    found.write(BlockHeader(2, 2, 2, 3 * MIB), lambda memory: None)
    assert read_header(first).step == 1
    assert driver.calls == []
    threading.Timer(0.05, driver.goes_on.set).start()
    commit(found, 9 * MIB, 3)
    assert ("unregister", 3) in driver.calls
    assert driver.problems == []


@pytest.mark.parametrize("result", [2, RuntimeError("out of memory")])
def test_memory_that_the_driver_refuses_is_plain(
    result: int | Exception, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.result = result
    found = copies()
    for number in range(1, 6):
        commit(found, 3 * MIB, number)
    del found
    gc.collect()
    assert driver.calls == [("register", 3), ("register", 3)]
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 1
    assert "elasticjob: commits copy to plain memory, which is slower: the driver does not register" in reported[0]
    assert pinned_memory.registered_bytes == 0


def test_memory_beyond_a_limit_is_plain(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first copy fits, and both do not."""
    monkeypatch.setattr(pinned_memory, "lockable_bytes", lambda: 4 * MIB)
    found = copies()
    for number in range(1, 6):
        commit(found, 3 * MIB, number)
    assert driver.calls == [("register", 3)]
    assert "6.0 MiB exceed the limit of locked memory (RLIMIT_MEMLOCK), which is 4.0 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "registered", "lockable", "usable", "refused"),
    [
        (10, 0, None, 20, False),
        (11, 0, None, 20, True),
        (5, 6, None, 20, True),
        (5, 5, 10, 100, False),
        (5, 6, 10, 100, True),
        (5, 0, 0, 100, True),
    ],
)
def test_what_may_be_registered(size: int, registered: int, lockable: int | None, usable: int, refused: bool) -> None:
    assert bool(pinned_memory.pinning_refusal(size, registered, lockable, usable)) == refused


def uses_no_device(driver: Driver) -> None:
    driver.initialized = False


def has_no_context(driver: Driver) -> None:
    driver.contexts = set()


@pytest.mark.parametrize("change", [uses_no_device, has_no_context])
def test_a_process_without_a_device_registers_nothing(change: Callable[[Driver], None], driver: Driver) -> None:
    change(driver)
    commit(copies(), 3 * MIB)
    assert driver.calls == []


@pytest.mark.parametrize(("current", "contexts", "used"), [(0, {0, 3}, 0), (2, {2}, 2), (0, {3}, 3)])
def test_no_device_gets_a_context_for_it(current: int, contexts: set[int], used: int, driver: Driver) -> None:
    """A script that calls no `set_device` may use another GPU than the current one."""
    driver.current, driver.contexts = current, contexts
    commit(copies(), 3 * MIB)
    assert driver.devices == [("register", used)]


def test_workers_that_keep_no_copy_of_the_node_register_nothing(driver: Driver) -> None:
    commit(copies(is_writer=False), 3 * MIB)
    assert driver.calls == []


def test_small_memory_stays_plain(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "SMALLEST", 4 * GRANULE)
    commit(copies(), 3 * MIB)
    assert driver.calls == []


def test_a_fork_leaves_the_memory_to_its_parent(driver: Driver) -> None:
    """It has no such thread, for which it must not wait, and no device."""
    found = copies()
    commit(found, 3 * MIB)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            driver.initialized = False  # torch says so in a fork
            begun = time.monotonic()
            found.registered[next(iter(found.registered))].end(60.0)
            commit(found, 9 * MIB, 2)
            if driver.calls == [("register", 3)] and time.monotonic() - begun < WAIT:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.calls == [("register", 3)]


def test_the_limit_of_a_container(tmp_path: Path) -> None:
    machine = pinned_memory.usable_bytes(tmp_path)
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert pinned_memory.usable_bytes(tmp_path) == machine
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    assert pinned_memory.usable_bytes(tmp_path) == MIB
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert pinned_memory.usable_bytes(tmp_path) == machine


def test_a_process_with_the_capability_may_lock_all_memory() -> None:
    text = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)
    assert (pinned_memory.lockable_bytes() is None) or not capabilities & 1 << 14


def test_threads_end_with_the_copies(driver: Driver) -> None:
    found = copies()
    commit(found, 3 * MIB)
    threads = [thread for thread in threading.enumerate() if thread.name == "elasticjob-register"]
    assert threads
    del found
    gc.collect()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()

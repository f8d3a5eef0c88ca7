"""How the collectives of backends that have an `abort`, such as nccl, are broken; a stub is the backend."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from elasticjob.inprocess._groups import process_groups  # noqa: E402
from elasticjob.inprocess._groups.own_sockets import listening  # noqa: E402
from elasticjob.inprocess._groups.process_groups import ProcessGroups  # noqa: E402

TIMEOUT = 60.0


class Backend:
    """A backend whose `abort` waits, as that of nccl does for its kernels and its peers."""

    def __init__(self, *waits: threading.Event | threading.Barrier) -> None:
        self._waits = waits
        self.aborted_in: list[threading.Thread] = []

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        for wait in self._waits:
            wait.wait(TIMEOUT)
        self.aborted_in.append(threading.current_thread())


class FailingBackend(Backend):
    """A backend that was aborted before."""

    def abort(self) -> None:
        super().abort()
        raise RuntimeError("no communicator")


class Group:
    """A process group with one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._device_types = [SimpleNamespace(type="cuda")]

    def _get_backend(self, _device: object) -> Backend:
        return self._backend


def created(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> ProcessGroups:
    """Return the groups that a function has created."""
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", lambda _size, group: group)
    groups = ProcessGroups()
    with groups.watch():
        for backend in backends:
            group = Group(backend)
            monkeypatch.setitem(distributed_c10d._world.pg_map, group, ("nccl", None))
            distributed_c10d._new_process_group_helper(2, group)
    return groups


def test_each_backend_is_aborted_once_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they could wait for ever: the peers may abort theirs in another order."""
    together, interrupted = threading.Barrier(3), threading.Event()
    backends = [Backend(interrupted, together), FailingBackend(interrupted, together), Backend(interrupted, together)]
    groups = created(monkeypatch, *backends)
    groups.break_collectives()
    interrupted.set()  # only now can they end: the monitor thread does not wait for them
    groups.leave()
    threads = [thread for backend in backends for thread in backend.aborted_in]
    assert len(set(threads)) == len(threads) == 3
    assert not together.broken
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("broken_before", [True, False])
def test_groups_are_left_once_their_aborts_have_ended(broken_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the device is synchronized, which would wait for collectives, and before the groups are destroyed."""
    joined, seen = threading.Event(), []
    backend = Backend(joined)
    groups = created(monkeypatch, backend)
    join = threading.Thread.join

    def join_and_release(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.set()
        join(thread, timeout)

    def synchronize() -> None:
        seen.append(len(backend.aborted_in))
        joined.set()

    monkeypatch.setattr(threading.Thread, "join", join_and_release)
    monkeypatch.setattr(process_groups, "synchronize_device", synchronize)
    if broken_before:
        groups.break_collectives()
    groups.leave()
    assert seen == [1]


# ---- a backend that is written in Python and registered with torch, with tensors on the CPU

calls: list[str] = []
"""What was called of the groups of that backend, in order."""


class RecordingGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A group of one rank that says what ends it."""

    shutdown_waits: threading.Event | None = None

    def abort(self) -> None:
        calls.append("abort")
        if self.shutdown_waits is not None:
            self.shutdown_waits.set()

    def shutdown(self) -> None:
        if self.shutdown_waits is not None:
            assert self.shutdown_waits.wait(TIMEOUT)
        calls.append("shutdown")

    def getBackendName(self) -> str:  # noqa: N802  (torch's)
        return "recording"


def recording(_store: Any, rank: int, size: int, _timeout: Any) -> RecordingGroup:
    return RecordingGroup(rank, size)


dist.Backend.register_backend("recording", recording, devices=["cpu"])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroups]:
    """The groups of a function that has made two of that backend."""
    calls.clear()
    monkeypatch.setattr(process_groups, "synchronize_device", lambda: calls.append("synchronize"))
    found = ProcessGroups()
    with found.watch():
        dist.init_process_group("recording", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        yield found
    if dist.is_initialized():
        dist.destroy_process_group()


def test_an_interrupted_round_aborts_its_groups_before_anything_waits_for_the_device(groups: ProcessGroups) -> None:
    groups.break_collectives()
    groups.leave()
    assert calls == ["abort", "abort", "synchronize", "shutdown", "shutdown"]
    assert not dist.is_initialized()


def test_a_planned_end_aborts_nothing(groups: ProcessGroups) -> None:
    """A peer's last collective may still need this rank: the kernels are waited for, then each group ends by itself."""
    groups.leave(planned=True)
    assert calls == ["synchronize", "shutdown", "shutdown"]
    assert not dist.is_initialized()


def test_a_planned_end_that_was_interrupted_is_none(groups: ProcessGroups) -> None:
    groups.break_collectives()
    groups.leave(planned=True)
    assert calls[:2] == ["abort", "abort"]


def test_the_groups_of_a_planned_end_are_aborted_if_they_do_not_end_in_time(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer was lost at that moment: nothing ends without an abort."""
    monkeypatch.setattr(process_groups, "PLANNED_END_TIMEOUT", 0.01)
    monkeypatch.setattr(RecordingGroup, "shutdown_waits", threading.Event())
    groups.leave(planned=True)
    assert sorted(calls) == ["abort", "abort", "shutdown", "shutdown", "synchronize"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("hangs", ["abort", "device"])
def test_a_rank_whose_device_does_not_end_its_work_gets_an_exception(
    groups: ProcessGroups, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an agent, only its own time limit ends the wait."""
    never = threading.Event()
    if hangs == "device":
        monkeypatch.setattr(process_groups, "synchronize_device", lambda: never.wait(TIMEOUT))
        text = "the device did not finish its work after the abort within 0.01 s"
    else:
        monkeypatch.setattr(RecordingGroup, "abort", lambda _: never.wait(TIMEOUT))
        text = "the communicators were not aborted within 0.01 s"
    with pytest.raises(TimeoutError, match=text):
        groups.leave(timeout=0.01)
    never.set()


def test_groups_that_were_not_seen_before_are_known_when_they_are_broken(groups: ProcessGroups) -> None:
    """torch's own table has them: groups of a library, and of the script before its function."""
    other = ProcessGroups()
    other.break_collectives()
    other.leave()
    assert calls.count("abort") == 2


def test_a_backend_is_aborted_while_its_group_is_being_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """The creation waits for peers (`device_id`), and torch's table does not have the group yet."""
    backend, waits, ended = Backend(), threading.Event(), threading.Event()

    def create(_size: int, group: Any) -> None:
        distributed_c10d.ProcessGroup._register_backend(group, torch.device("cpu"), None, backend)
        waits.set()
        assert ended.wait(TIMEOUT)

    monkeypatch.setattr(distributed_c10d.ProcessGroup, "_register_backend", lambda *_: None)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", create)
    groups = ProcessGroups()
    with groups.watch():
        creation = threading.Thread(target=distributed_c10d._new_process_group_helper, args=(2, Group(backend)))
        creation.start()
        assert waits.wait(TIMEOUT)
        groups.break_collectives()
        ended.set()
        creation.join()
    groups.leave()
    assert len(backend.aborted_in) == 1


def accepts(listener: socket.socket) -> bool:
    return listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@pytest.mark.parametrize(("backend", "fails"), [("nccl", True), ("cuda:nccl,cpu:gloo", False)])
def test_a_creation_that_waits_in_a_library_fails(backend: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No object exists that could be aborted. Sockets of gloo are left alone: an error in its thread is not caught."""
    waits, ended = threading.Event(), threading.Event()
    accepted: list[bool] = []

    def create(_size: int, _rank: int, _ranks: list[int], _backend: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            waits.set()
            while not fails and not ended.is_set():
                listener.accept()[0].close()  # what takes the place of gloo's peers
            with suppress(OSError):
                listener.accept()
            accepted.append(accepts(listener))

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", create)
    groups = ProcessGroups()
    with groups.watch(), socket.create_server(("127.0.0.1", 0)) as older:
        creation = threading.Thread(target=distributed_c10d._new_process_group_helper, args=(2, 0, [0, 1], backend))
        creation.start()
        assert waits.wait(TIMEOUT)
        ended.set()
        groups.break_collectives()
        creation.join(TIMEOUT)
        assert not creation.is_alive()
        assert accepted == [not fails]
        assert accepts(older), "it was there before"
    groups.leave()


class PollingBackend(Backend):
    """A backend whose `abort` waits for a thread that looks at its flag when its `poll` returns, as nccl's proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ended = threading.Event()
        self._flag = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while not self._flag:
            if poll.poll(int(1000 * TIMEOUT)):
                self.listener.accept()[0].close()
        self.ended.set()

    def abort(self) -> None:
        self._flag = True
        assert self.ended.wait(TIMEOUT)
        super().abort()


@pytest.mark.parametrize("had_sockets", [False, True])
def test_an_abort_does_not_wait_until_a_poll_times_out(had_sockets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that listened before the group was created gets no connection."""
    made: list[PollingBackend] = []

    def create(_size: int) -> None:
        made.append(PollingBackend())
        group = Group(made[0])
        monkeypatch.setitem(distributed_c10d._world.pg_map, group, ("nccl", None))

    listening_before = listening if had_sockets else set
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", create)
    groups = ProcessGroups()
    with socket.create_server(("127.0.0.1", 0)) as older, groups.watch():
        with monkeypatch.context() as patch:
            patch.setattr(process_groups, "listening", listening_before)
            distributed_c10d._new_process_group_helper(2)
        groups.break_collectives()
        assert made[0].ended.wait(TIMEOUT / 2), "it is woken up"
        groups.leave()
        older.setblocking(False)
        if had_sockets:
            with pytest.raises(BlockingIOError):
                older.accept()
    made[0].listener.close()


@pytest.mark.parametrize("failing", ["shutdown", "_update_default_pg"])
def test_groups_with_the_same_names_follow_those_that_did_not_end(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group cannot be ended, or `init_process_group` was interrupted before it had set the default group."""

    def init() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def fail(*_: object) -> None:
        raise RuntimeError("requested by the test")

    groups = ProcessGroups()
    with groups.watch():
        if failing == "shutdown":
            init()
            monkeypatch.setattr(distributed_c10d.ProcessGroup, failing, fail)
        else:
            monkeypatch.setattr(distributed_c10d, failing, fail)
            with pytest.raises(RuntimeError, match="requested"):
                init()
        monkeypatch.undo() if failing != "shutdown" else None
        groups.leave()
    monkeypatch.undo()
    assert not dist.is_initialized()
    with groups.watch():
        init()
        groups.leave()

"""How the collectives of backends that have an `abort`, such as nccl, are broken; a stub is the backend."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from torch.distributed import distributed_c10d  # noqa: E402

from elasticjob.inprocess import process_groups  # noqa: E402
from elasticjob.inprocess.process_groups import ProcessGroups  # noqa: E402

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

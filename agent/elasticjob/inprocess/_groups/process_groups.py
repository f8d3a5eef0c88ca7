"""The process groups of this process: break their collectives, which end all waits in them, and leave them.

gloo: a wait for a peer that was stopped or cut off lasts for the group's whole time-out. `abort` does not end
that, a shutdown of the group's connections does. They are found by their addresses: gloo listens on one address for
each group and publishes it in the group's store. Other connections of the process are left alone.

A group that is being created may wait for connections that a silent peer never opens, for five times its time-out.
`break_collectives` opens and closes these connections in place of the peer: then the creation fails.

Other backends, nccl above all: `abort`. It does not reach a communicator that is being created: torch waits in NCCL's
library for it, and has no object yet that could be aborted. The sockets that have appeared since are shut down, which
ends the wait with an error.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticjob.inprocess._groups.background_end import end_in_background
from elasticjob.inprocess._groups.gloo_addresses import published_addresses, read_in_time
from elasticjob.inprocess._groups.group_creation import GroupCreation, connect_in_place_of_peers, store_addresses
from elasticjob.inprocess._groups.lost_operation import gloo_workers, waits_for_lost_operation
from elasticjob.inprocess._groups.own_sockets import (
    Address,
    links,
    listening,
    shut_down_connections,
    shut_down_newer_than,
    socket_address,
)
from elasticjob.inprocess._groups.store_connection import interruptible_connections
from elasticjob.inprocess._groups.torch_groups import (
    backends_of,
    forget_groups,
    has_gloo,
    is_gloo,
    known_groups,
    published_by,
)
from elasticjob.inprocess._groups.wake_up import wake_while
from elasticjob.inprocess._threads.time_limit import run_within
from elasticjob.training.devices import synchronize_device
from elasticjob.training.sharded.device_mesh_caches import forget_device_meshes

_READ_TIMEOUT = 0.1
"""Seconds in which the addresses of a gloo group are read that was not seen when it was created."""

PLANNED_END_TIMEOUT = 5.0
"""Seconds in which the groups of a planned end must have ended, before they are aborted. All ranks end there after the
same step, and the last kernels take milliseconds. A peer that was lost at that moment would let this rank wait for
ever. The agent kills the process after 10 s (`LEAVE_TIMEOUT`), and an abort needs some of the rest."""


class ProcessGroups:
    """The process groups of this process. Addresses of gloo are known in time for groups that `watch` has seen."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Ids of the groups whose addresses have been read."""
        self.addresses: set[Address] = set()
        """Addresses on which the members of this process's gloo groups listen."""
        self._older_workers: frozenset[str] = frozenset()
        """Threads of gloo of groups that were not created while `watch` is active."""
        self._forming: list[Any] = []
        """Backends of the group that is being created: torch's table does not have it yet."""
        self._aborted: list[Any] = []
        self._aborts: list[threading.Thread] = []
        self._creating: GroupCreation | None = None
        self._listening_before: frozenset[tuple[Any, ...]] | None = None
        """The addresses on which this process listened before it had a backend with an `abort`."""
        self._links_before: frozenset[str] = links()
        """The sockets of this process when the last group had been created."""
        self._breaks = 0
        """How often `break_collectives` was called."""
        self._broken = False
        """Whether it was called since the groups were left."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Register every group that is created in this context, in whichever way: subgroups and those of device meshes,
        which are split from others (`split_group`), among them."""
        self._older_workers = gloo_workers()
        group = distributed_c10d.ProcessGroup
        with ExitStack() as stack:
            _patch(stack, distributed_c10d, "_new_process_group_helper", self._when_created)
            _patch(stack, group, "split_group", self._when_split)
            _patch(stack, group, "_register_backend", self._when_backend_is_registered)
            _patch(stack, distributed_c10d, "_register_process_group", self._when_registered)
            stack.enter_context(interruptible_connections())
            yield

    def break_collectives(self) -> None:
        """Make all collectives in progress fail, and later ones of these groups. Call it from any thread."""
        self._breaks += 1  # first: a group that is registered from now on sees it
        self._broken = True
        groups = known_groups()
        # Before anything else: kernels that are queued behind an abort delay it, and they become more.
        self._begin_aborts([*self._forming, *(backend for group, _ in groups for backend in backends_of(group))])
        gloo, self.addresses = self.addresses, set()
        if unknown := [group for group in groups if id(group[0]) not in self._known and has_gloo(group[0])]:
            self._known |= {id(group) for group, _ in unknown}
            gloo |= read_in_time([published_by(*group) for group in unknown], _READ_TIMEOUT)
        # Also the connections to the round's store: a group that is being created waits there for its members.
        shut_down_connections(gloo | store_addresses())
        if (creating := self._creating) and creating.gloo_follows:
            connect_in_place_of_peers(creating)
        elif creating:
            shut_down_newer_than(creating.links_before, keep=gloo)

    def break_formation(self) -> bool:
        """Shut down what may be the sockets of a communicator that forms in a collective; return whether any was.

        nccl connects its ranks in the first collective of a group, unless `init_process_group` has got a `device_id`.
        Nothing tells its sockets from others that this process has opened since the last group was created. So this is
        for a process that would be killed otherwise, after `break_collectives`.
        """
        if not self._aborted:
            return False
        return shut_down_newer_than(self._links_before, keep=store_addresses()) > 0

    @property
    def aborting(self) -> bool:
        """Whether an abort is in progress."""
        return any(thread.is_alive() for thread in self._aborts)

    def has_lost_operation(self) -> bool:
        """Return whether the main thread waits for an operation that gloo has lost (`waits_for_lost_operation`)."""
        return waits_for_lost_operation(self._older_workers)

    def leave(self, *, planned: bool = False, timeout: float | None = None) -> None:
        """In the main thread: destroy all groups. An error of the device is raised: this process cannot go on.

        `timeout`: seconds for the aborts, and then for the device. TimeoutError: it is unhealthy, or a kernel waits for
        something that no abort ends. None: no limit, because an agent kills this process if it takes too long.

        Their collectives are broken before: destroying a group waits for those of its peers. The threads of gloo, which
        wake up each 10 ms only, end while the next round forms: their connections are shut down.

        `planned`: all ranks have ended after the same step. Nothing is aborted, because a peer's last collective may
        need a thread of nccl in this process: each group ends once its kernels are done and its peers need it no more.
        Connections of gloo can be shut down: an operation has ended when the kernel has all that it sends, and the
        kernel delivers that.
        """
        if planned and not self._broken:
            self._leave_gracefully()
        else:
            if known_groups() or self._forming:
                self.break_collectives()
            run_within(timeout, self._join_aborts, "the communicators were not aborted")
            run_within(timeout, synchronize_device, "the device did not finish its work after the abort")
            self._destroy()
        # An interrupted `init_process_group` has counted its group: the next one would meet under another name.
        distributed_c10d._world.group_count = 0
        forget_device_meshes()

    def _leave_gracefully(self) -> None:
        limit = threading.Timer(PLANNED_END_TIMEOUT, self.break_collectives)
        limit.daemon = True
        limit.start()
        try:
            synchronize_device()
            shut_down_connections(self.addresses)
            self._destroy()
        finally:
            limit.cancel()
            limit.join()
            self._join_aborts()

    def _destroy(self) -> None:
        gloo = [backend for group, _ in known_groups() for backend in backends_of(group) if is_gloo(backend)]
        if dist.is_initialized():
            with suppress(RuntimeError):  # a group that was aborted
                dist.destroy_process_group()
        forget_groups()
        end_in_background(gloo)
        self._known, self.addresses, self._aborted, self._forming = set(), set(), [], []
        self._listening_before, self._broken = None, False

    # ---- creation of groups

    def _when_created(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_and_register(group_size: int, *args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[2] if len(args) > 2 else "")
            names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
            with self._creation(group_size, has_gloo="gloo" in names, has_others=names != {"gloo"}):
                return create(group_size, *args, **kwargs)

        return create_and_register

    def _when_split(self, split: Callable[..., Any]) -> Callable[..., Any]:
        def split_and_register(parent: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            kinds = {*map(is_gloo, backends_of(parent))}
            with self._creation(len(ranks), has_gloo=True in kinds, has_others=False in kinds):
                return split(parent, ranks, *args, **kwargs)

        return split_and_register

    def _when_backend_is_registered(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_register(group: Any, device: Any, kind: Any, backend: Any = None, *args: Any) -> Any:
            if backend is not None and not is_gloo(backend):
                self._forming.append(backend)
                if creating := self._creating:
                    self._note_listening(creating)
            elif (creating := self._creating) and creating.others_follow:  # their sockets come next
                self._creating = replace(creating, links_before=links(), gloo_follows=False)
            return register(group, device, kind, backend, *args)

        return note_and_register

    def _when_registered(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def register_and_read(*args: Any, **kwargs: Any) -> Any:
            result = register(*args, **kwargs)
            self._register()
            return result

        return register_and_read

    @contextmanager
    def _creation(self, size: int, *, has_gloo: bool, has_others: bool) -> Iterator[None]:
        """Let `break_collectives` end what the creation of a group may wait for in this context."""
        outer, breaks = self._creating, self._breaks
        before = frozenset() if has_gloo else links()
        creating = self._creating = GroupCreation(size, frozenset(listening()), before, has_gloo, has_others)
        # A new group may have the id of one that the function has destroyed.
        self._known &= {id(group) for group, _ in known_groups()}
        try:
            yield
            self._register()
            if any(not is_gloo(backend) for group, _ in known_groups() for backend in backends_of(group)):
                self._note_listening(creating)
        finally:
            self._creating = outer
            if has_others:
                self._links_before = links()
            self._forming.clear()
        if self._breaks != breaks:  # the connections in place of the peers came in time: it was created with them
            self.break_collectives()

    def _note_listening(self, creating: GroupCreation) -> None:
        if self._listening_before is None:
            self._listening_before = creating.listening_before

    def _register(self) -> None:
        for group, (_, store) in known_groups():
            if id(group) not in self._known:
                self._known.add(id(group))
                if has_gloo(group):
                    self.addresses |= published_addresses(*published_by(group, ("", store)))

    # ---- aborts

    def _begin_aborts(self, backends: list[Any]) -> None:
        """Abort each backend in a thread of its own: their peers may abort theirs in another order."""
        threads = []
        for backend in backends:
            if not is_gloo(backend) and all(backend is not known for known in self._aborted):
                self._aborted.append(backend)
                threads.append(threading.Thread(target=_abort, args=(backend,), daemon=True, name="abort"))
        for thread in threads:
            thread.start()
        if threads:
            before = listening() if self._listening_before is None else {*self._listening_before}
            before |= {address for address in listening() if socket_address(address) in self.addresses}
            wakes = threading.Thread(target=wake_while, args=(threads, before), daemon=True, name="abort-wake-up")
            wakes.start()
        self._aborts += threads

    def _join_aborts(self) -> None:
        for thread in self._aborts:
            thread.join()
        self._aborts = []


def _patch(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function or method by a wrapper of it until the stack is closed. A version of torch may lack it."""
    if (before := vars(owner).get(name)) is not None:  # not `getattr`: a method has to be put back as what binds it
        call = getattr(owner, name)
        setattr(owner, name, functools.wraps(call)(wrap(call)))
        stack.callback(setattr, owner, name, before)


def _abort(backend: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # it was aborted before, or has no `abort`
        backend.abort()


def collect_garbage() -> None:
    """Free what the last call of the function left in cycles: the old process groups and models among it."""
    gc.collect()

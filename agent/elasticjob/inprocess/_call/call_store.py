"""The store of one call: this rank's connections to it, and where the keys of the call and of its iterations are."""

from __future__ import annotations

import itertools

from elasticjob.inprocess._arguments.enforce import enforce_importable
from elasticjob.inprocess._call.wrapper_arguments import WrapperArguments
from elasticjob.inprocess._stores.socket_store import SocketStore
from elasticjob.inprocess._stores.store_mixin import StoreMixin
from elasticjob.inprocess.monitor_process import MonitorProcess

_calls = itertools.count()
"""Numbers of the calls in this process. All ranks make the same calls, and each call has its own keys in the store."""


class CallStore:
    """Three connections of this rank to the store: for hooks, for the main thread, and for the monitor thread.

    Order of calls: `open` before anything else, `close` and then `forget` at the end.
    """

    def __init__(self, arguments: WrapperArguments) -> None:
        self._arguments = arguments
        self._prefix = f"call/{next(_calls)}"
        self._base: StoreMixin = self._create()
        """The one for hooks."""

    def open(self) -> None:
        """Open the connections of the main thread and of the monitor thread."""
        self._link = self._open_link()
        self._monitor_link = self._open_link()

    def close(self) -> None:
        """End what `open` has opened."""
        _close(self._monitor_link)
        _close(self._link)

    def forget(self) -> None:
        """Release the connection for hooks. The caller lets go of the stores that it got for them."""
        del self._base

    def renew(self) -> None:
        """Replace the main thread's connection: an exception may have interrupted an operation in the middle."""
        if isinstance(self._link, SocketStore):
            self._link.close()
            self._link = self._link.connect()

    # ---- where the keys are

    @property
    def for_call(self) -> StoreMixin:
        """The store of this call, over the connection of the main thread."""
        return self._link.with_prefix(self._prefix)

    def for_iteration(self, iteration: int) -> StoreMixin:
        """Return the store of an iteration, over the connection of the main thread."""
        return self.for_call.for_iteration(iteration)

    @property
    def for_monitor_thread(self) -> StoreMixin:
        """The store of this call, over the connection of the monitor thread."""
        return self._monitor_link.with_prefix(self._prefix)

    @property
    def for_hooks(self) -> StoreMixin:
        """The store of this call for hooks, before the first iteration."""
        return self._base.with_prefix(self._prefix)

    def of_iteration_for_hooks(self, iteration: int) -> StoreMixin:
        """Return the store of an iteration for hooks."""
        return self.for_hooks.for_iteration(iteration)

    # ---- what the store can do

    @property
    def knows_lost_clients(self) -> bool:
        """Whether the store's server notices that the connections of a process have closed."""
        return self._base.knows_lost_clients

    @property
    def critical_ranks(self) -> frozenset[int]:
        """Initial ranks that host something the others need: they leave last."""
        return self._base.critical_ranks

    def let_connect(self, monitor_process: MonitorProcess) -> None:
        """Let a new monitor process connect to the store. TypeError: it cannot import what creates the store."""
        endpoint, pickled = self._base.endpoint(), b""
        if endpoint is None:
            factory = (self._arguments.store_factory, self._arguments.store_kwargs)
            pickled = enforce_importable("store_factory", factory, reason="the monitor process needs it too")
        monitor_process.can_create_store(endpoint, pickled, self._prefix, knows_lost_clients=self.knows_lost_clients)

    def _create(self) -> StoreMixin:
        store: StoreMixin = self._arguments.store_factory(**self._arguments.store_kwargs)
        return store

    def _open_link(self) -> StoreMixin:
        """Return a further connection to the store."""
        return self._base.connect() or self._create()


def _close(store: StoreMixin) -> None:
    if isinstance(store, SocketStore):
        store.close()

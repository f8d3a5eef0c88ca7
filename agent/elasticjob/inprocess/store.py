"""Stores for the wrapper that are `torch.distributed.Store` objects too."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticjob.inprocess import store_server
from elasticjob.inprocess.socket_store import SocketStore
from elasticjob.inprocess.store_mixin import StoreMixin


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[misc]  # torch has no types here
    """A store whose keys have a prefix: that of an iteration, so that no iteration finds keys of another."""

    def __init__(self, prefix: object, store: Any) -> None:
        dist.PrefixStore.__init__(self, str(prefix), store)
        self.critical_ranks = getattr(store, "critical_ranks", frozenset())

    def with_prefix(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, self)


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[misc]
    """The default store. Rank 0 starts its server as a process of its own, and leaves last."""

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        is_master: bool | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        """`host_name`: default MASTER_ADDR. `port`: default MASTER_PORT + 1: the launcher may use MASTER_PORT itself.

        `is_master`: whether this process starts the server; default: its RANK is 0. OSError: the port is in use.
        """
        host_name = os.environ["MASTER_ADDR"] if host_name is None else host_name
        port = int(os.environ["MASTER_PORT"]) + 1 if port is None else port
        if os.environ["RANK"] == "0" if is_master is None else is_master:
            try:
                store_server.serve(port)
            except OSError as error:
                message = f"port {port} for the wrapper's store is in use ({error}): set store_kwargs={{'port': ...}}"
                raise OSError(error.errno, message) from error
        dist.TCPStore.__init__(
            self, host_name, port, is_master=False, wait_for_workers=False, timeout=timeout, use_libuv=False
        )
        self._endpoint = (host_name, port)
        self._timeout = timeout

    def with_prefix(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, self)

    def connect(self) -> SocketStore:
        return SocketStore.open(*self._endpoint, self._timeout)

    def endpoint(self) -> tuple[str, int]:
        return self._endpoint


def serve_process_groups() -> Any:
    """Return a new TCPStore server on a free port of this process, for `init_process_group` in one iteration."""
    options = {"is_master": True, "wait_for_workers": False}
    try:
        return dist.TCPStore("localhost", 0, **options)
    except RuntimeError:  # a torch that is built without libuv
        return dist.TCPStore("localhost", 0, use_libuv=False, **options)

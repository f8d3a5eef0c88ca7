"""Stores for the wrapper that are `torch.distributed.Store` objects too."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticjob.inprocess._stores import store_server
from elasticjob.inprocess._stores.socket_store import SocketStore
from elasticjob.inprocess._stores.store_mixin import StoreMixin


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[misc]  # torch has no types here
    """A store whose keys have a prefix: that of an iteration, so that no iteration finds keys of another."""

    def __init__(self, prefix: object, store: Any) -> None:
        dist.PrefixStore.__init__(self, str(prefix), store)
        self.critical_ranks = getattr(store, "critical_ranks", frozenset())

    def with_prefix(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, self)


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[misc]
    """The default store. Rank 0 starts its server as a process of its own, and leaves last."""

    knows_lost_clients = True

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        is_master: bool | None = None,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        """`host_name`: default MASTER_ADDR.

        `port`: default any free port, if the launcher has a store through which ranks learn it, as torchrun has; else
        MASTER_PORT + 1: rank 0 may need MASTER_PORT itself.
        `is_master`: whether this process starts the server; default: its RANK is 0. OSError: the port is in use.
        """
        host_name = os.environ["MASTER_ADDR"] if host_name is None else host_name
        is_master = os.environ["RANK"] == "0" if is_master is None else is_master
        if port is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = _port_by_launcher(is_master=is_master, timeout=timeout)
        elif port is None:
            port = int(os.environ["MASTER_PORT"]) + 1
        if is_master:
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


_own_port = 0
"""Port of the server that this process has started, if it was free to choose. 0: none."""


def _port_by_launcher(*, is_master: bool, timeout: timedelta) -> int:
    """Return the port of the wrapper's store: that of rank 0's server, known to the others by the launcher's store."""
    global _own_port
    launcher = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout, use_libuv=False
    )
    key = f"elasticjob/inprocess/port/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if is_master:
        _own_port = store_server.serve(_own_port)
        launcher.set(key, str(_own_port))
    return int(launcher.get(key))


def serve_process_groups() -> Any:
    """Return a new TCPStore server on a free port of this process, for `init_process_group` in one iteration."""
    options = {"is_master": True, "wait_for_workers": False}
    try:
        return dist.TCPStore("localhost", 0, **options)
    except RuntimeError:  # a torch that is built without libuv
        return dist.TCPStore("localhost", 0, use_libuv=False, **options)

"""torch's TCPStore as client and server, for every version of torch, and our store as a child process."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import subprocess
import weakref
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import RoundSettings, StartRound
from elasticjob._runtime.contract.names import DEFAULT_PORT, Env, StoreClients
from elasticjob._runtime.system.code_root import program
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text
from elasticjob._runtime.system.sockets.listening_socket import listen_on_all_addresses

READ_TIMEOUT = 60
"""Seconds that a store operation may take; the default of `read_timeout`."""


def parse_endpoint(params: RendezvousParameters) -> tuple[str, int]:
    """Return host and port of the rendezvous. Raise ValueError if the endpoint is invalid."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    return str(host), int(port)


def parse_read_timeout(params: RendezvousParameters) -> int:
    """Return `read_timeout` in seconds. Raise ValueError if it is not positive."""
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    return int(read_timeout)


def tcp_store(host: str, port: int, *, serve: bool, timeout: float) -> Any:
    """Return a `TCPStore`. A server with port 0 chooses a free port. Raise RendezvousConnectionError on failure."""
    options = {"is_master": serve, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
    try:
        return dist.TCPStore(host, port, use_libuv=_has_libuv(), **options)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(f"the store at {endpoint_text(host, port)} is unavailable: {error}") from error


@functools.cache
def _has_libuv() -> bool:
    """Return whether torch has the libuv server. Debian's torch lacks it and raises instead of falling back."""
    if os.environ.get("USE_LIBUV") == "0":
        return False
    try:
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return False
    return True


class RoundStoresOfTorch:
    """The process-group stores that this node serves, for the current round and for the next one.

    They are torch's own servers. Unlike our store, they need no GIL while torchrun's threads wait in C++.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """`address`: this node's. `timeout`: seconds for an operation on a store."""
        self._address = address
        self._timeout = timeout
        self._by_port: dict[int, Any] = {}

    @property
    def ports(self) -> frozenset[int]:
        """The ports of the stores that are being served."""
        return frozenset(self._by_port)

    def serve_next(self) -> int:
        """Start the store of the next round and return its port."""
        store = tcp_store(self._address, 0, serve=True, timeout=self._timeout)
        self._by_port[store.port] = store
        return int(store.port)

    def store_of(self, start: StartRound, run_id: str) -> Any:
        """Return the store of a round, for torchrun's own keys. RendezvousConnectionError: it is unavailable."""
        store = self._by_port.get(start.master_port) if start.group_rank == 0 else None
        if store is None:
            store = tcp_store(start.master_addr, start.master_port, serve=False, timeout=self._timeout)
        # Workers use the same store, so torchrun's own keys get a prefix.
        return dist.PrefixStore(f"torch.rendezvous.{run_id}.{start.round}", store)

    def end_stores_except(self, port: int) -> None:
        """End all stores but the one with this port."""
        self._by_port = {p: store for p, store in self._by_port.items() if p == port}

    def clear(self) -> None:
        """End all stores."""
        self._by_port = {}


class HostedStore:
    """`elasticjob store` as a child process that ends with this process. `port` accepts connections from the start.

    Not a thread, because torch's client in this process can hold the GIL while it waits for the store's answer. The
    kernel's parent-death signal would not work either: the kernel sends it when the thread that started the child ends.
    """

    def __init__(
        self,
        params: RendezvousParameters,
        port: int,
        settings: RoundSettings,
        clients: StoreClients = StoreClients.NONE,
    ) -> None:
        """Start the store. `port` 0 chooses a free port. Raise OSError if the port is in use."""
        with listen_on_all_addresses(port, backlog=_BACKLOG) as listener:
            self.port: int = listener.getsockname()[1]
            parent_fd, own_end = os.pipe()
            environ = {
                **os.environ,
                Env.RUN_ID: params.run_id,
                Env.NODE_KEY: node_key(params).hex(),
                Env.OPERATOR_KEY: secrets.token_hex(32),
                Env.SETTINGS: codec.dumps(settings).decode(),
                Env.STORE_CLIENTS: clients.value,
                Env.LISTEN_FD: str(listener.fileno()),
                Env.PARENT_FD: str(parent_fd),
            }
            self.process = subprocess.Popen(
                [*program(), "store"],
                env={name: value for name, value in environ.items() if name not in _NOT_INHERITED},
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(), parent_fd),
                start_new_session=True,
            )
            os.close(parent_fd)
        self.close = weakref.finalize(self, _terminate, self.process, own_end)


def host_store(
    params: RendezvousParameters,
    host: str,
    port: int,
    settings: RoundSettings,
    clients: StoreClients = StoreClients.NONE,
) -> HostedStore | None:
    """Start the store at the endpoint if this process hosts it; otherwise return None.

    `is_host` decides. Without it, the first process that gets the port on the endpoint's host runs the store.
    Raise RendezvousConnectionError if `is_host` is true and the port is in use.
    """
    is_host = params.get_as_bool("is_host")
    if not (_matches_machine_hostname(host) if is_host is None else is_host):
        return None
    try:
        hosted = HostedStore(params, port, settings, clients)
    except OSError as error:
        if is_host:
            raise RendezvousConnectionError(f"this process cannot host the store on port {port}: {error}") from error
        return None  # another process on this host runs it
    message = f"Process {os.getpid()} hosts the store."
    construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.INIT)
    return hosted


_NOT_INHERITED = (Env.STATE_DIR, Env.STORE_INCARNATION, Env.EXECUTION_ATTEMPT)


_BACKLOG = 4096
"""Connections that wait until the store accepts them."""
END_TIMEOUT = 5.0
"""Seconds that a hosted store has to end."""


def _terminate(process: subprocess.Popen[bytes], own_end: int) -> None:
    # Closing the pipe ends the store at once. After SIGTERM alone it would wait for nodes that are ending their round.
    os.close(own_end)
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:  # a child of this process may hold the pipe
        process.kill()
        process.wait()


def node_key(params: RendezvousParameters) -> bytes:
    """Return the key that nodes prove to the store: the option `key`, else the pod's key, else a hash of the run id.

    The hash protects nothing: as with torch's backends, every process that reaches the port can then join.
    Raise ValueError if the key is not hexadecimal.
    """
    given = params.get("key") or os.environ.get(Env.NODE_KEY)
    if given is None:
        return hashlib.sha256(b"elasticjob:" + params.run_id.encode()).digest()
    try:
        return bytes.fromhex(str(given))
    except ValueError:
        raise ValueError("The rendezvous configuration option 'key' must be hexadecimal.") from None

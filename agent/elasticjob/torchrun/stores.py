"""Torch's TCPStore as client and as server, on every torch; and our own store as a process of this machine."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import subprocess
import weakref
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from elasticjob.agent.processes import die_with_parent
from elasticjob.code_root import program
from elasticjob.contract import codec
from elasticjob.contract.messages import RoundSettings
from elasticjob.contract.names import DEFAULT_PORT, Env

READ_TIMEOUT = 60
"""Seconds that an operation on a store may take, unless `read_timeout` says otherwise."""


def parse_endpoint(params: RendezvousParameters) -> tuple[str, int]:
    """Host and port of the rendezvous; ValueError where the endpoint names none."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    return str(host), int(port)


def parse_read_timeout(params: RendezvousParameters) -> int:
    """Seconds, positive."""
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    return int(read_timeout)


def tcp_store(host: str, port: int, *, serve: bool, timeout: float) -> Any:
    """A `TCPStore`; RendezvousConnectionError where it cannot be had. Serving on port 0 takes a free one."""
    options = {"is_master": serve, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
    try:
        return dist.TCPStore(host, port, use_libuv=_has_libuv(), **options)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(f"no store at {host}:{port}: {error}") from error


@functools.cache
def _has_libuv() -> bool:
    """Debian's torch is built without, and fails instead of doing without."""
    if os.environ.get("USE_LIBUV") == "0":
        return False
    try:
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return False
    return True


class HostedStore:
    """`elasticjob store` as a child that dies with this process. `port` takes connections once this is made.

    A process of its own: a client in this one may hold the interpreter's lock while it waits for the answer.
    """

    def __init__(self, params: RendezvousParameters, port: int, settings: RoundSettings) -> None:
        """OSError where the port is taken."""
        with _listen(port) as listening:
            self.port: int = listening.getsockname()[1]
            environ = {
                **os.environ,
                Env.RUN_ID: params.run_id,
                Env.NODE_KEY: node_key(params).hex(),
                Env.OPERATOR_KEY: secrets.token_hex(32),
                Env.SETTINGS: codec.dumps(settings).decode(),
                Env.LISTEN_FD: str(listening.fileno()),
            }
            self._process = subprocess.Popen(
                [*program(), "store"],
                env={name: value for name, value in environ.items() if name not in _NOT_INHERITED},
                stdin=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.close = weakref.finalize(self, _end, self._process)


def host_store(params: RendezvousParameters, host: str, port: int, settings: RoundSettings) -> HostedStore | None:
    """The store at the endpoint, where it is this process's to host: by `is_host`, else by the host's name, first come.

    RendezvousConnectionError where `is_host` says so and the port is taken.
    """
    asked = params.get_as_bool("is_host")
    if not (_matches_machine_hostname(host) if asked is None else asked):
        return None
    try:
        hosted = HostedStore(params, port, settings)
    except OSError as error:
        if asked:
            raise RendezvousConnectionError(f"cannot host the store on port {port}: {error}") from error
        return None  # somebody else on this machine hosts it
    message = f"Process {os.getpid()} hosts the store."
    construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.INIT)
    return hosted


_NOT_INHERITED = (Env.STATE_DIR, Env.STORE_INCARNATION, Env.EXECUTION_ATTEMPT)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("0.0.0.0", port), backlog=4096)  # noqa: S104


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def node_key(params: RendezvousParameters) -> bytes:
    """`key` of the configuration or the pod's own; without either the run id stands for it: then, as with torch's
    backends, whoever reaches the port may take part."""
    given = params.get("key") or os.environ.get(Env.NODE_KEY)
    if given is None:
        return hashlib.sha256(b"elasticjob:" + params.run_id.encode()).digest()
    try:
        return bytes.fromhex(str(given))
    except ValueError:
        raise ValueError("The rendezvous configuration option 'key' must be hexadecimal.") from None

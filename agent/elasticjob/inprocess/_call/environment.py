"""Environment variables from which `init_process_group` reads ranks and its store, new in each iteration."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from elasticjob._runtime.contract.names import Env
from elasticjob.inprocess._stores.socket_store import SocketStore
from elasticjob.inprocess._stores.store_mixin import StoreMixin
from elasticjob.inprocess.state import State

TOPOLOGY_VARIABLE = "ELASTICJOB_TOPOLOGY"
"""Names of the domains that enclose this Node, the outermost first, separated by `/`, and its own name."""
_RESTORED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
_KEY = "process-groups"


def host_name() -> str:
    """Return this host's place in the topology: its name, unless ELASTICJOB_TOPOLOGY is set."""
    return os.environ.get(TOPOLOGY_VARIABLE) or socket.gethostname()


class Environment:
    """Sets the variables for each iteration.

    Active rank 0 serves a new store for the process groups, so that no iteration finds addresses of an earlier one,
    and so that ranks may move to other hosts. For torch this is the store of an agent: all ranks are clients.
    """

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _RESTORED}
        self._server: Any = None

    def prepare(self, state: State, store: StoreMixin) -> None:
        """Set the ranks; on active rank 0, serve the store of the process groups. Before the iteration barrier."""
        _set_world(state.distributed_variables())
        if state.active_rank == 0:
            from elasticjob.inprocess.store import serve_process_groups

            self._server = serve_process_groups()
            store.set(_KEY, f"{self._own_address(state, store)} {self._server.port}")

    def enter(self, store: StoreMixin) -> None:
        """Set the address of the process groups' store. After the iteration barrier."""
        if not store.exists([_KEY]):  # active rank 0 has ended: a restart follows
            return
        host, port = bytes(store.get(_KEY)).decode().split()
        _set_world({"MASTER_ADDR": host, "MASTER_PORT": port})
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")  # torch 2.4 reads it with an agent's store

    def close_store(self) -> None:
        """End the store of the process groups: ranks that wait for a lost one in it get an error. In any thread."""
        self._server = None

    def restore(self, state: State) -> None:
        """Set all variables for what follows the call: the rank among all ranks, and the launcher's address."""
        self.close_store()
        _set_world({"RANK": str(state.rank), "WORLD_SIZE": str(state.world_size)})
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                _set_world({name: value})

    def _own_address(self, state: State, store: StoreMixin) -> str:
        master = self._before["MASTER_ADDR"]
        if isinstance(store, SocketStore):
            return master if master and store.connection.is_local else store.connection.own_address
        return master if master and state.initial_rank == 0 else socket.gethostname()


def _set_world(variables: Mapping[str, str]) -> None:
    """Set variables, and below an agent its own copy of them, by which it checks process groups and launchers."""
    os.environ.update(variables)
    if Env.WORLD in os.environ:
        before = dict(word.split("=", 1) for word in os.environ[Env.WORLD].split())
        known = {name: variables.get(name, value) for name, value in before.items()}
        os.environ[Env.WORLD] = " ".join(f"{name}={value}" for name, value in known.items())

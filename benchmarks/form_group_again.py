"""Lets ranks on this machine form their process group again and again, each time after its connections were broken.

Arguments: a way (`ours`, `destroy` or `reconfigure`), and how many ranks. It prints the median seconds, in rank 0, from
the broken group to the end of the first all_reduce in the new one.

Two things end slowly: the threads of a gloo group, each of which wakes up every 10 ms, and a wait for a peer whose
connections are still open. `ours` lets the threads end in the background.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticjob.inprocess._groups.own_sockets import ip_sockets, listens
from elasticjob.inprocess._groups.process_groups import ProcessGroups

ROUNDS = 25
NOT_COUNTED = 5
"""Rounds before the first that counts."""
TIMEOUT = timedelta(seconds=30)


class Ours:
    """As in a function with `elasticjob.restartable`."""

    def __init__(self) -> None:
        self._groups = ProcessGroups()

    def leave(self) -> None:
        self._groups.leave()

    def join(self, store: Any, rank: int, size: int) -> None:
        with self._groups.watch():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


class Destroy:
    """As any program can."""

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        distributed_c10d._world.group_count = 0  # the same name again

    def join(self, store: Any, rank: int, size: int) -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


class Reconfigure:
    """The group object stays and gets the handles of all members, from torch 2.14.1 on."""

    def __init__(self) -> None:
        self._joined = 0

    def leave(self) -> None:
        pass

    def join(self, store: Any, rank: int, size: int) -> None:
        if not self._joined:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT, enable_reconfigure=True
            )
        self._joined += 1
        group: Any = distributed_c10d._get_default_group()
        options: Any = torch._C._distributed_c10d.ReconfigureOptions()
        store.set(f"handle/{rank}", group.get_reconfigure_handle())
        options.handles = [handle.decode() for handle in store.multi_get([f"handle/{each}" for each in range(size)])]
        options.uuid, options.timeout = self._joined, TIMEOUT
        group.reconfigure(options).wait()


WAYS = {"ours": Ours, "destroy": Destroy, "reconfigure": Reconfigure}


def break_connections(store_port: int) -> None:
    """Shut down all connections of this process but those to the store."""
    for _, found in ip_sockets():
        with suppress(OSError):  # not connected
            if not listens(found) and store_port not in (found.getpeername()[1], found.getsockname()[1]):
                found.shutdown(socket.SHUT_RDWR)


def rank_main(way: str, rank: int, size: int, port: int, barrier: Any) -> None:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    side: Any = WAYS[way]()
    seconds = []
    for number in range(ROUNDS):
        break_connections(port)
        barrier.wait()
        begun = time.perf_counter()
        side.leave()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        side.join(dist.PrefixStore(str(number), store), rank, size)
        one = torch.ones(1)
        dist.all_reduce(one)
        seconds.append(time.perf_counter() - begun)
        assert one.item() == size
        barrier.wait()
    if rank == 0:
        print(f"{statistics.median(seconds[NOT_COUNTED:]):.6f}", flush=True)
    os._exit(0)


def main(way: str, size: int) -> None:
    # On a socket for IPv6 as well, torch's server stalls for 5 s now and then: see `process_group`.
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    barrier = multiprocessing.Barrier(size)
    ranks = [
        multiprocessing.Process(target=rank_main, args=(way, rank, size, store.port, barrier)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

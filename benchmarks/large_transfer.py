"""Sends a State of 1 GB to a rank without it, and as many bytes over a plain TCP connection, in turns.

It is what `transfer-1gb` runs, on three nodes, of which two have the state. Rank 1 prints the seconds of each pair.
All memory of the tensors and of the plain copy has been written before.
"""

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import elasticjob

GIGABYTE = 1_000_000_000
TENSORS = 8
PAIRS = 9

torch.set_num_threads(1)
network = torch.nn.ParameterList(torch.rand(GIGABYTE // 4 // TENSORS) for _ in range(TENSORS))
states = [elasticjob.State(network=network, step=0) for _ in range(PAIRS + 1)]
"""Rank 1 takes another one for each transfer, which has no state yet. The other ranks keep the first."""
buffer = bytearray(GIGABYTE)


def plain_connection(rank: int) -> socket.socket | None:
    """Connect ranks 0 and 1, over the address that their process group uses."""
    address = os.environ["MASTER_ADDR"]
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        listener = socket.create_server((address, 0))
        port.fill_(listener.getsockname()[1])
        dist.broadcast(port, 0)
        connection, _ = listener.accept()
        listener.close()
        return connection
    dist.broadcast(port, 0)
    return socket.create_connection((address, int(port))) if rank == 1 else None


def send_plain(connection: socket.socket | None, rank: int) -> None:
    if connection is None:
        return
    if rank == 0:
        connection.sendall(buffer)
        return
    left = memoryview(buffer)
    while left:
        left = left[connection.recv_into(left) :]


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@elasticjob.restartable
def measure() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    connection = plain_connection(rank)
    states[0].sync()
    for step in range(1, PAIRS + 1):
        state = states[step if rank == 1 else 0]
        if rank != 1:
            state.step = step
        plain = seconds(lambda: send_plain(connection, rank))
        sync = seconds(state.sync)
        if rank == 1:
            assert state.step == step
            print(f"pair sync={sync:.6f} plain={plain:.6f}", flush=True)
    if connection is not None:
        connection.close()
    dist.destroy_process_group()
    print("all transfers measured", flush=True)


measure()

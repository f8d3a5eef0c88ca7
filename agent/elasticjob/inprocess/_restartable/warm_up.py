"""Do torch's one-time initialization (first group, first DDP step) while a prestarted process waits for its round.

A fork shares its memory with the fork server until it writes there, and torch, its backends and drivers set up much
when it is first used. In a round, all other ranks would wait for that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from elasticjob._runtime.contract.names import Env
from elasticjob.inprocess._restartable.kernels import load_kernels

GPU_TIMEOUT = 60.0
"""Seconds that the part on a GPU may take. Alone on an H100 it took about 1 s (context, kernels, nccl). A GPU that
trains at the same time gives a second process only a share of its time, and a driver that hangs none at all."""

_abandoned: list[Any] = []
"""Groups whose threads still work on a GPU: their end would wait for it."""


def warm_up() -> bool:
    """Form a group of one rank and reduce gradients of a small model: on the CPU, and on the GPU if the script uses it.

    On the GPU it also runs what a step of most models runs. Channels to other ranks cannot be made before their round.
    The caller leaves the group. Nothing else is left: the generators that a script seeds are as before, and no step of
    an optimizer is counted. What fails is only reported, to stderr: the round may not need it. Return False if the GPU
    does not answer: then the process must not wait for it, and the group is gone.
    """
    gpu = gpu_of_process()
    try:
        backend = "cpu:gloo,cuda:nccl" if gpu is not None and gpu.type == "cuda" else "gloo"
        with _any_world():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        with torch.random.fork_rng(devices=[]):
            models = [torch.nn.Linear(4, 4, dtype=torch.float32, device="cpu") for _ in range(2)]
        reduce_gradients(models[0], torch.device("cpu"), group)
        return gpu is None or _warm_up_gpu(models[1], gpu, group)
    except Exception as error:
        _report(str(error))
        return True


@contextmanager
def _any_world() -> Iterator[None]:
    """Permit a process group that is not that of a round."""
    world = os.environ.pop(Env.WORLD, None)
    try:
        yield
    finally:
        if world is not None:
            os.environ[Env.WORLD] = world


def _warm_up_gpu(model: torch.nn.Module, gpu: torch.device, group: Any) -> bool:
    """Do the part on a GPU in a thread, because a call of the driver cannot be interrupted; return whether it ended."""
    errors: list[str] = []
    thread = threading.Thread(target=_use_gpu, args=(model, gpu, group, errors), daemon=True, name="warm-up")
    thread.start()
    thread.join(GPU_TIMEOUT)
    if thread.is_alive():
        _report(
            f"{gpu} has not done a small step with {dist.get_backend(group)} within {GPU_TIMEOUT:g} s; "
            "this process goes on without"
        )
        _abandon(group)
        return False
    for error in errors:
        _report(error)
    return True


def _use_gpu(model: torch.nn.Module, gpu: torch.device, group: Any, errors: list[str]) -> None:
    """In a thread that may go on for long: it must not touch the generators, nor the groups of the function."""
    try:
        if gpu.type == "cuda":
            torch.cuda.set_device(gpu)  # each thread has a device of its own
        reduce_gradients(model, gpu, group)
        if gpu.type == "cuda":
            load_kernels(gpu.type)
            torch.cuda.synchronize(gpu)  # an error of a kernel is reported here, and not to the script
    except Exception as error:
        errors.append(str(error))


def _abandon(group: Any) -> None:
    """Let the function form its own groups, while a thread still works with this one."""
    _abandoned.append(group)
    distributed_c10d._world.pg_names.clear()  # so that it is not shut down
    dist.destroy_process_group()


def gpu_of_process() -> torch.device | None:
    """Return the GPU that the script uses; None if it uses none. Another one would get a context, and its memory."""
    if not (torch.cuda.is_initialized() and dist.is_nccl_available()):
        return None
    return gpu_to_use(torch.cuda.current_device(), [*map(torch.cuda.memory_reserved, range(torch.cuda.device_count()))])


def gpu_to_use(current: int, reserved: Sequence[int]) -> torch.device:
    """Return the current device, unless the script has memory on other ones only; `reserved`: bytes on each."""
    used = [index for index, size in enumerate(reserved) if size]
    return torch.device("cuda", current if current in used or not used else used[0])


def reduce_gradients(network: torch.nn.Module, device: torch.device, group: Any) -> None:
    """Run both passes of a model on the device. The script may have set another default for devices and types."""
    with torch.enable_grad():
        model = DistributedDataParallel(network.to(device), process_group=group)
        inputs = torch.ones(4, 4, dtype=torch.float32, device=device)
        labels = torch.zeros(4, dtype=torch.int64, device=device)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        dist.all_gather([torch.zeros_like(labels)], labels, group=group)


def _report(reason: str) -> None:
    sys.stderr.write(f"elasticjob: the first round of this process will take longer: {reason}\n")

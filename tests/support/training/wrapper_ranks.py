"""Run a script with `elasticjob.inprocess.Wrapper` as several ranks, without an agent of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import elasticjob
from support.common.child_process import ChildProcess
from support.common.ports import free_port
from support.common.torch_forks import StartFork

Ranks = Callable[..., AbstractContextManager[Sequence[ChildProcess]]]
"""`start_ranks` without its argument `fork`."""
PRELUDE = """
import atexit, contextlib, ctypes, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from elasticjob.inprocess import *
from elasticjob.inprocess._call.call_wrapper import monitor_process

FOLDER = sys.argv[1]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def seconds(**values):
    return {name: timedelta(seconds=value) for name, value in values.items()}

def join(call):
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    one = torch.ones(1)
    dist.all_reduce(one)
    say("trains", os.environ["RANK"], "of", int(one.item()), "iteration", call.iteration, "pid", os.getpid())
    return dist.get_rank()

def meet():
    # Each rank waits for all others here: how long their imports take is in no time-out then.
    open(FOLDER + "/started-" + os.environ["RANK"], "w").close()
    while any(not os.path.exists(f"{FOLDER}/started-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)

@atexit.register
def end_groups():  # the wrapper leaves those of the last iteration
    with contextlib.suppress(Exception):
        dist.destroy_process_group()

def wait_in_collective():
    dist.all_reduce(torch.ones(1))

def records(state):
    return " ".join(f"{r.rank}:{r.interruption.name}" for r in state.store.get_interruption_records())

class SayRecords(Finalize):
    def __call__(self, state, exception):
        say("records", records(state))
"""


@contextmanager
def start_ranks(
    folder: Path,
    script: str,
    world_size: int,
    hosts: Sequence[str] = (),
    *,
    fork: StartFork | None = None,
    **variables: str,
) -> Iterator[Sequence[ChildProcess]]:
    """Run a script as `world_size` ranks on this machine, each with the environment that a launcher sets.

    `hosts`: ELASTICJOB_TOPOLOGY of each rank; default: the ranks share this machine.
    `fork`: what starts each rank; default: `python`.
    """
    (folder / "script.py").write_text(PRELUDE + script)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(elasticjob.__file__).parents[1]), str(folder)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(following=1)),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, str(folder / "script.py"), str(folder)]
    own = [{"ELASTICJOB_TOPOLOGY": host} for host in hosts] or [{}] * world_size
    with ExitStack() as stack:
        environs = [{**environ, **own[rank], "RANK": str(rank)} for rank in range(world_size)]
        yield [stack.enter_context(ChildProcess(command, env=each, fork=fork)) for each in environs]


def trains(process: ChildProcess, rank: int, world_size: int, iteration: int) -> None:
    """Wait until a process trains, as it was started, with this rank."""
    line = f"trains {rank} of {world_size} iteration {iteration} pid {process.process.pid}$"
    process.wait_for(line)

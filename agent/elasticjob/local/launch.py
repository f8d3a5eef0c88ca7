"""`elasticjob.launch`: run a function, or a program, in elastic workers on this machine, and get what they return.

What torch's `elastic_launch` does, on the agent, store and rounds that run everywhere else here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from elasticjob.contract.messages import Failure
from elasticjob.contract.names import GROUP, KIND, VERSION, ExitCode, RoundId
from elasticjob.local.launch_entry import CALL, VALUE
from elasticjob.local.local_run import LocalRun
from elasticjob.local.manifest import parse_local_job


class WorkerState(str, Enum):
    """torch's states of a group of workers, which fails and succeeds as a unit."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether the processes exist, healthy or not."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: all workers succeeded, or it failed; workers that an agent stopped are in neither."""

    state: WorkerState
    """SUCCEEDED, FAILED, or STOPPED by a signal to this process."""
    return_values: dict[int, Any] = field(default_factory=dict)
    """By global rank, of the round that succeeded; empty for a program."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """The root cause, by global rank; empty where no worker is to blame."""

    def is_failed(self) -> bool:
        return self.state is WorkerState.FAILED


def launch(
    entrypoint: Callable[..., Any] | str,
    *args: Any,
    nproc_per_node: int = 1,
    nodes: int = 1,
    min_nodes: int | None = None,
    max_restarts: int = 3,
    preload: Sequence[str] = ("torch", "torch._dynamo"),
    env: dict[str, str] | None = None,
) -> RunResult:
    """Run `entrypoint(*args)` in `nodes * nproc_per_node` workers, restarted together up to `max_restarts` times.

    A function must be one that `multiprocessing` could spawn: found by its name in a module, in `__main__` too if that
    guards its own call of `launch`. A string is a program, with `args` as its arguments. The workers' environment is
    torchrun's. From the main thread only. ManifestError for numbers that make no sense, pickle's errors for a function
    or arguments that cannot be handed over.
    """
    with tempfile.TemporaryDirectory(prefix="elasticjob-launch-") as scratch:
        folder = Path(scratch)
        command = [entrypoint, *map(str, args)] if isinstance(entrypoint, str) else _call(entrypoint, args, folder)
        elastic = {"minReplicas": min_nodes or nodes, "maxReplicas": nodes}
        container: dict[str, Any] = {"name": "trainer", "command": command, "workingDir": os.getcwd()}  # noqa: PTH109
        container["env"] = [{"name": name, "value": value.replace("$", "$$")} for name, value in (env or {}).items()]
        spec = {
            "replicas": nodes,
            "nprocPerNode": nproc_per_node,
            "elasticPolicy": elastic,
            "failurePolicy": {"maxRestarts": max_restarts},
            "preload": list(preload),
            "template": {"spec": {"containers": [container]}},
        }
        metadata = {"name": "launch"}
        job = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}
        driver = LocalRun(parse_local_job(job))
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = asyncio.run(driver.run())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return _result(code, driver, folder)


def _call(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> list[str]:
    """Leave the call for the workers; the command that makes it."""
    preparation = spawn.get_preparation_data("worker")
    del preparation["authkey"]  # each worker has its own
    preparation["sys_argv"] = list(sys.argv)
    with (folder / CALL).open("wb") as file:
        pickle.dump(preparation, file)
        pickle.dump((function, args), file)
    return [sys.executable, "-m", "elasticjob.local.launch_entry", str(folder)]


def _result(code: int, driver: LocalRun, folder: Path) -> RunResult:
    if code == ExitCode.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED, return_values=_values(folder))
    if code != ExitCode.FAILED:
        return RunResult(WorkerState.STOPPED)
    failure = driver.failure
    named = {} if failure is None or failure.rank is None else {failure.rank: failure}
    return RunResult(WorkerState.FAILED, failures=named)


def _values(folder: Path) -> dict[int, Any]:
    """Those of the last round: earlier ones may have ended on some ranks before another failed."""
    found = {}
    for path in folder.glob(f"*{VALUE}"):
        round_id, _, rank = path.name.removesuffix(VALUE).rpartition("-")
        found[RoundId.parse(round_id), int(rank)] = path
    last = max((round_id for round_id, _ in found), default=None)
    return {rank: pickle.loads(found[r, rank].read_bytes()) for r, rank in sorted(found) if r == last}  # noqa: S301

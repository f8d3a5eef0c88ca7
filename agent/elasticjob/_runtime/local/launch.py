"""`elasticjob.launch`: run a function or a program in elastic workers on this machine and return their results.

It does what torch's `elastic_launch` does, with the same store, coordinator and agents as a job on a cluster.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from elasticjob._runtime.contract.messages import Failure
from elasticjob._runtime.contract.names import GROUP, KIND, VERSION, ExitCode, RoundId
from elasticjob._runtime.local.launch_entry import CALL, VALUE
from elasticjob._runtime.local.local_run import LocalRun
from elasticjob._runtime.local.manifest.manifest import parse_local_job
from elasticjob._runtime.system.daemon_threads import run_without_joining


class WorkerState(str, Enum):
    """torch's states of a worker group. A group fails or succeeds as a unit.

    Example:
        >>> elasticjob.WorkerState.is_running(elasticjob.WorkerState.SUCCEEDED)
        False
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether the processes exist, healthy or not."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass(frozen=True)
class RunResult:
    """The result of a run. Workers that an agent stopped are neither in `return_values` nor in `failures`.

    Example:
        >>> result = elasticjob.RunResult(elasticjob.WorkerState.SUCCEEDED, return_values={0: "trained"})
        >>> result.is_failed(), result.return_values[0]
        (False, 'trained')
    """

    state: WorkerState
    """SUCCEEDED, FAILED, or STOPPED after a signal to this process."""
    return_values: dict[int, Any] = field(default_factory=dict)
    """Return values of the round that succeeded, by global rank. Empty for a program."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """The root cause, by global rank. Empty if no worker caused the failure."""

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
    """Run `entrypoint(*args)` in `nodes * nproc_per_node` workers, and return the result.

    Call `launch` from the main thread. The workers restart together; their environment is torchrun's.

    Args:
        entrypoint: A function that can be imported by name, as for `multiprocessing` with spawn: a script that defines
            it in `__main__` must guard its call of `launch`. Or a program.
        args: Arguments of the function or the program.
        nproc_per_node: Workers of each node of the job.
        nodes: Nodes of the job, which all run on this host.
        min_nodes: Nodes with which the workers go on when others are lost. None: all.
        max_restarts: How often the workers restart, at most.
        preload: Modules that are imported before workers are forked.
        env: Further environment variables of the workers.

    Returns:
        What the workers returned, or why they failed. A failure is not raised.

    Raises:
        ManifestError: A number is invalid.
        PicklingError: The function or its arguments cannot be pickled (or another error of pickle).

    Example:
        >>> result = elasticjob.launch(sys.executable, "-c", "print('hello')", nproc_per_node=2, preload=())
        >>> result.state
        <WorkerState.SUCCEEDED: 'SUCCEEDED'>
    """
    with tempfile.TemporaryDirectory(prefix="elasticjob-launch-") as scratch:
        folder = Path(scratch)
        command = (
            [entrypoint, *map(str, args)] if isinstance(entrypoint, str) else _write_call(entrypoint, args, folder)
        )
        settings = {
            "replicas": nodes,
            "nprocPerNode": nproc_per_node,
            "elasticPolicy": {"minReplicas": min_nodes or nodes, "maxReplicas": nodes},
            "failurePolicy": {"maxRestarts": max_restarts},
            "preload": list(preload),
        }
        run = LocalRun(parse_local_job(_manifest(command, env or {}, settings)))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = run_without_joining(run.run())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return _result(code, run, folder)


def _manifest(command: Sequence[str], env: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job whose workers run the command here. `settings`: further fields of its spec."""
    container = {
        "name": "trainer",
        "command": list(command),
        "workingDir": os.getcwd(),  # noqa: PTH109
        "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in env.items()],
    }
    spec = {**settings, "template": {"spec": {"containers": [container]}}}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "launch"}, "spec": spec}


def _write_call(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> list[str]:
    """Write the call to a file for the workers and return their command."""
    preparation = spawn.get_preparation_data("worker")
    del preparation["authkey"]  # each worker creates its own
    preparation["sys_argv"] = list(sys.argv)
    with (folder / CALL).open("wb") as file:
        pickle.dump(preparation, file)
        pickle.dump((function, args), file)
    return [sys.executable, "-m", "elasticjob._runtime.local.launch_entry", str(folder)]


def _result(code: int, run: LocalRun, folder: Path) -> RunResult:
    if code == ExitCode.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED, return_values=_return_values(folder))
    if code != ExitCode.FAILED:
        return RunResult(WorkerState.STOPPED)
    failure = run.failure
    failures = {} if failure is None or failure.rank is None else {failure.rank: failure}
    return RunResult(WorkerState.FAILED, failures=failures)


def _return_values(folder: Path) -> dict[int, Any]:
    """Return the values of the last round. In earlier rounds some ranks may have returned before another failed."""
    found = {}
    for path in folder.glob(f"*{VALUE}"):
        round_id, _, rank = path.name.removesuffix(VALUE).rpartition("-")
        found[RoundId.parse(round_id), int(rank)] = path
    last = max((round_id for round_id, _ in found), default=None)
    return {rank: pickle.loads(found[r, rank].read_bytes()) for r, rank in sorted(found) if r == last}  # noqa: S301

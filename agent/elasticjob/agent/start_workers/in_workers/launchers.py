"""A launcher that starts below a worker becomes the worker: torchrun, accelerate, and what else calls torch's agent.

The pod's command has started once for each local rank. torch's agent (`launch_agent`) would start ranks of its own in
each of them. Instead, this process becomes the program that the agent would start, as the rank that it already is.
What the launcher has set in its environment stays.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Sequence
from string import Template
from types import ModuleType
from typing import Any, NoReturn

from .assigned import assigned, restore_assigned
from .one_world import ALLOWED, TRAINS, fail

LAUNCHED = "ELASTICJOB_LAUNCHED"
"""1 in the program that a launcher below this worker has started."""
SHIMS = "ELASTICJOB_SHIMS"
"""The agent's folder of shims, by which Python starts as a fork; absent without them."""


def replace_agent(module: ModuleType) -> None:
    """Replace `launch_agent` of torch.distributed.launcher.api."""
    launch = module.launch_agent

    @functools.wraps(launch)
    def launch_agent(config: Any, entrypoint: Any, args: Any, *others: Any, **named: Any) -> dict[int, Any]:
        if not assigned() or os.environ.get(ALLOWED) == "1":
            result: dict[int, Any] = launch(config, entrypoint, args, *others, **named)
            return result
        return _become_worker(config, entrypoint, list(args or ()))

    module.launch_agent = launch_agent  # type: ignore[attr-defined]


def _become_worker(config: Any, entrypoint: Any, args: Sequence[Any]) -> dict[int, Any]:
    """Run the entry point as the rank that this process belongs to; a command never returns."""
    if TRAINS in os.environ or LAUNCHED in os.environ:
        fail(
            "a launcher starts below a worker that trains already: it would train apart from the others. Start the"
            f" script without it, or set {ALLOWED}=1 in the pod template if this is meant"
        )
    restore_assigned()
    _check_number(int(config.nproc_per_node))
    os.environ["ROLE_NAME"] = str(config.role)
    os.environ[LAUNCHED] = "1"
    if callable(entrypoint):
        try:
            return {int(os.environ["RANK"]): entrypoint(*args)}
        finally:
            os.environ.pop(LAUNCHED, None)
            os.environ.pop(TRAINS, None)
    words = [Template(str(arg)).safe_substitute(local_rank=os.environ["LOCAL_RANK"]) for arg in args]
    text = f"[elasticjob] rank {os.environ['RANK']} runs {' '.join([str(entrypoint), *words])[:500]} in place of"
    print(f"{text} {sys.argv[0]}, whose nodes and rendezvous have no effect", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return _exec([str(entrypoint), *words])


def _check_number(asked: int) -> None:
    """Fail if a launcher asks for another number of workers than a node has.

    accelerate's number is that of all nodes, and an elastic job has not always the same number of nodes.
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    of_all_nodes = "ACCELERATE_MIXED_PRECISION" in os.environ
    if asked == local or (of_all_nodes and asked % local == 0):
        return
    unit = "in all" if of_all_nodes else "on each node"
    fail(
        f"the launcher asks for {asked} workers {unit}, and the job has {local} on each node: set"
        f" spec.nprocPerNode: {asked}, or leave the number out of the command"
    )


def _exec(argv: list[str]) -> NoReturn:
    """Replace this process by a program: through the agent's shim, where that stands for the same Python."""
    program = shutil.which(argv[0]) or argv[0]
    shim = os.path.join(os.environ.get(SHIMS, ""), os.path.basename(program))  # noqa: PTH118, PTH119
    if SHIMS in os.environ and os.access(shim, os.X_OK) and _behind_shim(program) == program:
        program = shim
    os.execv(program, [program, *argv[1:]])  # noqa: S606


def _behind_shim(program: str) -> str | None:
    """Return the program that the shim of this name stands for."""
    folders = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry != os.environ[SHIMS]]
    return shutil.which(os.path.basename(program), path=os.pathsep.join(folders))  # noqa: PTH119

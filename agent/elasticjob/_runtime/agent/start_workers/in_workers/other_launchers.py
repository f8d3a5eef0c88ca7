"""Launchers that do not call torch's agent: deepspeed and composer become the rank that they start below.

Both would start one process for each GPU of a node. As with torch's agent, the process becomes the program that the
launcher would start instead, with the variables and arguments that its script expects. ft_launcher and hyperpodrun have
an elastic agent of their own and are refused. Parsers and names are those of deepspeed 0.19, composer 0.32,
nvidia-resiliency-ext 0.4 and hyperpod-elastic-agent 1.1.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys

from .assigned import assigned, restore_assigned
from .launchers import become_rank, check_local_number
from .one_world import ALLOWED, cannot_patch, fail
from .refused import REFUSED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


def replace_deepspeed(module: ModuleType) -> None:
    """Replace `main` of deepspeed.launcher.runner: the program `deepspeed`."""

    def run(args: list[str] | None = None) -> None:
        parsed = module.parse_args(args)
        if parsed.num_gpus > 0:
            check_local_number(parsed.num_gpus)
        _become_deepspeed_rank(parsed, parsed.user_script, parsed.user_args)

    # Autotuning starts trainings of its own, one after the other: they are refused when they form their groups.
    _replace(module, "main", run, unless=lambda args=None: "--autotuning" in _words(args))


def replace_deepspeed_node(module: ModuleType) -> None:
    """Replace `main` of deepspeed.launcher.launch, which starts the ranks of one node."""

    def run() -> None:
        parsed = module.parse_args()
        nodes = list(json.loads(base64.urlsafe_b64decode(parsed.world_info)).values())
        if nodes:
            check_local_number(len(nodes[min(parsed.node_rank, len(nodes) - 1)]))
        _become_deepspeed_rank(parsed, parsed.training_script, parsed.training_script_args)

    _replace(module, "main", run)


def replace_composer(module: ModuleType) -> None:
    """Replace `main` of composer.cli.launcher: the program `composer`."""

    def run() -> None:
        parsed = module._get_parser().parse_args()  # not `_parse_args`: it checks ranks that have no effect
        if parsed.nproc is not None:
            check_local_number(parsed.nproc)
        restore_assigned()
        argv = [] if parsed.command_mode else [sys.executable]
        argv += ["-m"] if parsed.module_mode else []
        os.environ.update(NODE_RANK=assigned()["GROUP_RANK"], PYTHONUNBUFFERED="1")
        # composer expands variables such as $RANK in the arguments of the script.
        args = [os.path.expandvars(os.path.expanduser(arg)) for arg in parsed.training_script_args]  # noqa: PTH111
        become_rank([*argv, parsed.training_script, *args], "nodes, ranks and log files")

    _replace(module, "main", run)


def refuse_ft_launcher(module: ModuleType) -> None:
    """Replace `launch_agent` of nvidia_resiliency_ext.fault_tolerance.launcher."""
    _replace(module, "launch_agent", lambda *_args, **_named: fail(REFUSED["ft_launcher"]))


def refuse_hyperpodrun(module: ModuleType) -> None:
    """Replace `main` of hyperpod_elastic_agent.run: the program `hyperpodrun`."""
    _replace(module, "main", lambda *_args, **_named: fail(REFUSED["hyperpodrun"]))


def _become_deepspeed_rank(parsed: Any, script: str, args: list[str]) -> None:
    given = assigned()
    argv = [] if parsed.no_python else [sys.executable, "-u"]
    argv += ["-m"] if parsed.module else []
    local_rank = [] if parsed.no_local_rank else [f"--local_rank={given['LOCAL_RANK']}"]
    os.environ.update(
        CROSS_RANK=given["GROUP_RANK"], CROSS_SIZE=given["GROUP_WORLD_SIZE"], LOCAL_SIZE=given["LOCAL_WORLD_SIZE"]
    )
    become_rank([*argv, script, *local_rank, *args], "hosts, devices, cores and log files")


def _replace(
    module: ModuleType, name: str, run: Callable[..., Any], unless: Callable[..., bool] = lambda *_args: False
) -> None:
    """Replace a function of a module below a worker of a job, except where `unless` returns true for its arguments."""
    original = getattr(module, name, None)
    if original is None:
        cannot_patch(f"{module.__name__}.{name}")
        return

    @functools.wraps(original)
    def replacement(*args: Any, **named: Any) -> Any:
        is_original = not assigned() or os.environ.get(ALLOWED) == "1" or unless(*args, **named)
        return original(*args, **named) if is_original else run(*args, **named)

    setattr(module, name, replacement)


def _words(args: list[str] | None) -> list[str]:
    return [word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)]

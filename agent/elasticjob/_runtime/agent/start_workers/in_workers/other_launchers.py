"""Launchers that do not call torch's agent: what deepspeed and composer start are the ranks of the pod.

Both would start one process for each GPU of a node. As with torch's agent, the agent of the pod runs the program that
the launcher would start, or the process becomes it, with the variables and arguments that its script expects.
ft_launcher and hyperpodrun have an elastic agent of their own and are refused. Parsers and names are those of deepspeed
0.19, composer 0.32, nvidia-resiliency-ext 0.4 and hyperpod-elastic-agent 1.1.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
from string import Template
from typing import NamedTuple

from .assigned import assigned, restore_assigned
from .hand_over import hand_over
from .launchers import become_rank, check_local_number, end_as_ranks, refuse_in_training
from .one_world import ALLOWED, LAUNCHES, cannot_patch, fail
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
        asked = parsed.num_gpus if parsed.num_gpus > 0 else None
        _run_deepspeed(parsed, parsed.user_script, parsed.user_args, asked)

    # Autotuning starts trainings of its own, one after the other: they are refused when they form their groups.
    _replace(module, "main", run, unless=lambda args=None: "--autotuning" in _words(args))


def replace_deepspeed_node(module: ModuleType) -> None:
    """Replace `main` of deepspeed.launcher.launch, which starts the ranks of one node."""

    def run() -> None:
        parsed = module.parse_args()
        nodes = list(json.loads(base64.urlsafe_b64decode(parsed.world_info)).values())
        asked = len(nodes[min(parsed.node_rank, len(nodes) - 1)]) if nodes else None
        _run_deepspeed(parsed, parsed.training_script, parsed.training_script_args, asked)

    _replace(module, "main", run)


def replace_composer(module: ModuleType) -> None:
    """Replace `main` of composer.cli.launcher: the program `composer`."""

    def run() -> None:
        parsed = module._get_parser().parse_args()  # not `_parse_args`: it checks ranks that have no effect
        argv = [] if parsed.command_mode else [sys.executable]
        argv += ["-m"] if parsed.module_mode else []
        args = [os.path.expanduser(arg) for arg in parsed.training_script_args]  # noqa: PTH111
        os.environ["PYTHONUNBUFFERED"] = "1"
        # composer expands variables such as $RANK in the arguments of the script.
        program = _Ranks([*argv, parsed.training_script], args, {"NODE_RANK": "GROUP_RANK"}, expands=True)
        _run_ranks(program, parsed.nproc, "nodes, ranks and log files")

    _replace(module, "main", run)


def refuse_ft_launcher(module: ModuleType) -> None:
    """Replace `launch_agent` of nvidia_resiliency_ext.fault_tolerance.launcher."""
    _replace(module, "launch_agent", lambda *_args, **_named: fail(REFUSED["ft_launcher"]))


def refuse_hyperpodrun(module: ModuleType) -> None:
    """Replace `main` of hyperpod_elastic_agent.run: the program `hyperpodrun`."""
    _replace(module, "main", lambda *_args, **_named: fail(REFUSED["hyperpodrun"]))


class _Ranks(NamedTuple):
    """What a launcher runs as each rank."""

    program: list[str]
    args: list[str]
    """torchrun's macro `${local_rank}` is replaced in them, unless variables are."""
    variables: dict[str, str]
    """Variables that each rank gets, and torchrun's names of their values."""
    expands: bool = False
    """Whether variables in the arguments are replaced by their values in the rank."""


def _run_deepspeed(parsed: Any, script: str, args: list[str], asked: int | None) -> None:
    argv = [] if parsed.no_python else [sys.executable, "-u"]
    argv += ["-m"] if parsed.module else []
    local_rank = [] if parsed.no_local_rank else ["--local_rank=${local_rank}"]
    words = [*local_rank, *(arg.replace("$", "$$") for arg in args)]
    variables = {"CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    _run_ranks(_Ranks([*argv, script], words, variables), asked, "hosts, devices, cores and log files")


def _run_ranks(ranks: _Ranks, asked: int | None, without_effect: str) -> None:
    """Let the agent run the ranks of the pod if its command runs once, or become the rank that this process is.

    `asked`: the number of workers on each node that the launcher asks for; None: none. SystemExit if the ranks fail.
    """

    def check() -> None:
        if asked is not None:
            check_local_number(asked)

    refuse_in_training()
    restore_assigned()
    if LAUNCHES in os.environ:
        argv = [*ranks.program, *ranks.args]
        if end_as_ranks(hand_over(argv, check, variables=ranks.variables, expands=ranks.expands)):
            return
    check()
    given = assigned()
    os.environ.update({name: given[value] for name, value in ranks.variables.items()})
    if ranks.expands:
        args = list(map(os.path.expandvars, ranks.args))
    else:
        args = [Template(arg).safe_substitute(local_rank=given["LOCAL_RANK"]) for arg in ranks.args]
    become_rank([*ranks.program, *args], without_effect)


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

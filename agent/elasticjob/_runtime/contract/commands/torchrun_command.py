"""torchrun's command line, by the rules of torch's own parser, and what each option means to elasticjob. Pure.

Operator, agent and `elasticjob run` read it: the number of workers in a command counts for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from elasticjob._runtime.contract.commands.python_command import (
    ProgramMode,
    PythonCommand,
    base_name,
    is_python,
    parse_python_command,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser

TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
NPROC_PER_NODE = "nproc-per-node"
PET_PREFIX = "PET_"
"""torchrun's variables: PET_NPROC_PER_NODE sets an absent --nproc-per-node."""


class CommandError(ValueError):
    """No worker can run the command; the message says what to change."""


class AmbiguousOptionError(CommandError):
    """An abbreviation fits several spellings: older versions of Python refuse some that newer ones accept."""


class OptionUse(str, Enum):
    """What elasticjob does with an option of torchrun."""

    HONOURED = "honoured"
    REPLACED = "replaced"
    """Without effect: `TorchrunOption.reason` names what is in force instead. The agent logs it once."""
    REFUSED = "refused"


@dataclass(frozen=True)
class TorchrunOption:
    """An option of torchrun."""

    name: str
    use: OptionUse
    reason: str = ""
    """What replaces the option, or what to do without it."""
    short: str = ""
    parse: type[str] | type[int] | type[float] | None = str
    """Type of the value; None: a switch."""
    choices: tuple[str, ...] | None = None
    has_variable: bool = True
    """Whether PET_<NAME> sets the option too."""

    @property
    def variable(self) -> str:
        return PET_PREFIX + self.name.replace("-", "_").upper()


_REPLICAS = "spec.replicas and spec.elasticPolicy set the number of pods"
_RENDEZVOUS = "the coordinator of the job runs the rendezvous"
_FIRST_NODE = "each round has a store of its own, in its first pod"
_POD_ADDRESS = "the address is the pod's; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for another network"
_OWN_AGENT = "remove it, or set spec.rendezvous.backend: c10d"
_HONOURED, _REPLACED, _REFUSED = OptionUse.HONOURED, OptionUse.REPLACED, OptionUse.REFUSED

TORCHRUN_OPTIONS: Mapping[str, TorchrunOption] = {
    option.name: option
    for option in (
        TorchrunOption("nnodes", _REPLACED, _REPLICAS),
        TorchrunOption(NPROC_PER_NODE, _HONOURED),
        TorchrunOption("rdzv-backend", _REPLACED, _RENDEZVOUS),
        TorchrunOption("rdzv-endpoint", _REPLACED, _RENDEZVOUS),
        TorchrunOption("rdzv-id", _REPLACED, _RENDEZVOUS),
        TorchrunOption("rdzv-conf", _REPLACED, "spec.rendezvous sets the time-outs"),
        TorchrunOption("standalone", _REPLACED, _RENDEZVOUS, parse=None),
        TorchrunOption("max-restarts", _REPLACED, "spec.failurePolicy.maxRestarts is the job's budget", parse=int),
        TorchrunOption("monitor-interval", _REPLACED, "the kernel reports the end of a worker at once", parse=float),
        TorchrunOption(
            "start-method", _REPLACED, "spec.preload sets how workers start", choices=("spawn", "fork", "forkserver")
        ),
        TorchrunOption("event-log-handler", _HONOURED),
        TorchrunOption("role", _HONOURED),
        TorchrunOption("module", _HONOURED, short="m", parse=None),
        TorchrunOption("no-python", _HONOURED, parse=None),
        TorchrunOption("run-path", _HONOURED, parse=None),
        TorchrunOption("log-dir", _HONOURED),
        TorchrunOption("redirects", _HONOURED, short="r"),
        TorchrunOption("tee", _HONOURED, short="t"),
        TorchrunOption("log-line-prefix-template", _HONOURED),
        TorchrunOption("local-ranks-filter", _HONOURED),
        TorchrunOption("duplicate-stdout-filters", _REFUSED, f"--tee and --redirects write log files: {_OWN_AGENT}"),
        TorchrunOption("duplicate-stderr-filters", _REFUSED, f"--tee and --redirects write log files: {_OWN_AGENT}"),
        TorchrunOption("node-rank", _REPLACED, "the coordinator ranks the pods", parse=int),
        TorchrunOption("master-addr", _REPLACED, _FIRST_NODE),
        TorchrunOption("master-port", _REPLACED, _FIRST_NODE, parse=int),
        TorchrunOption("local-addr", _REPLACED, _POD_ADDRESS),
        TorchrunOption("logs-specs", _REFUSED, f"the agent writes the logs: {_OWN_AGENT}", has_variable=False),
        TorchrunOption("numa-binding", _REFUSED, f"the agent binds no processors: {_OWN_AGENT}", has_variable=False),
        TorchrunOption("signals-to-handle", _HONOURED),
        TorchrunOption("shutdown-timeout", _REPLACED, "spec.stopGraceSeconds is in force", parse=int),
        TorchrunOption(
            "virtual-local-rank", _REFUSED, f"each worker has its own LOCAL_RANK: {_OWN_AGENT}", parse=None
        ),
        TorchrunOption("print-completion", _REFUSED, "it starts no worker: remove it", has_variable=False),
        TorchrunOption("help", _REFUSED, "it starts no worker: remove it", "h", parse=None, has_variable=False),
        TorchrunOption("use-env", _HONOURED, parse=None, has_variable=False),
    )
}  # fmt: skip
"""All options by name. `use-env` is one of torch.distributed.launch only."""


@dataclass(frozen=True)
class TorchrunCommand:
    """A parsed command line of torchrun or torch.distributed.launch."""

    options: Mapping[str, str] = field(hash=False)
    """The options that the command line or a variable sets, by name; the value of a switch is empty."""
    program: str
    args: tuple[str, ...]
    """Arguments of the program, with torchrun's macro `${local_rank}`."""


def torchrun_call(argv: Sequence[str]) -> tuple[PythonCommand | None, bool, tuple[str, ...]] | None:
    """Return torchrun's interpreter (None: that of the `torchrun` program), whether it is torch.distributed.launch,
    and its arguments; None if the command runs neither.
    """
    if argv and base_name(argv[0]) == "torchrun":
        return None, False, tuple(argv[1:])
    command = parse_python_command(argv) if argv and is_python(argv[0]) else None
    if isinstance(command, PythonCommand) and is_torchrun(command):
        return command, command.target == TORCHRUN_MODULES[1], command.args
    return None


def is_torchrun(command: PythonCommand) -> bool:
    """Return whether the command runs torchrun itself."""
    return command.mode is ProgramMode.MODULE and command.target in TORCHRUN_MODULES


def parse_torchrun(arguments: Sequence[str], env: Mapping[str, str], *, is_launch: bool = False) -> TorchrunCommand:
    """Parse torchrun's arguments; CommandError if torchrun itself would end with a usage error.

    `env`: PET_<NAME> sets an option that is absent. `is_launch`: they are arguments of torch.distributed.launch.
    """
    names = (option.variable for option in TORCHRUN_OPTIONS.values() if option.has_variable)
    variables = tuple((name, env[name]) for name in names if env.get(name))
    return _parse(tuple(arguments), variables, is_launch)


@lru_cache(maxsize=256)  # the operator parses a job's command at each reconcile
def _parse(arguments: tuple[str, ...], variables: tuple[tuple[str, str], ...], is_launch: bool) -> TorchrunCommand:
    found = vars(_parser(dict(variables), is_launch).parse_args(arguments))
    program, args = found.pop("training_script"), tuple(found.pop("training_script_args"))
    given = {name.replace("_", "-"): value for name, value in found.items() if value is not False}
    options = {name: "" if value is True else str(value) for name, value in given.items()}
    _check_program(options, is_launch=is_launch)
    if is_launch and "use-env" not in options:
        args = ("--local-rank=${local_rank}", *args)
    return TorchrunCommand(options, program, args)


def _check_program(options: Mapping[str, str], *, is_launch: bool) -> None:
    if options.get(NPROC_PER_NODE) == "":  # as of a shell variable that is not set
        raise CommandError("torchrun: --nproc-per-node is empty: name a number, gpu, cpu or auto, or leave it out")
    if "no-python" in options and is_launch and "use-env" not in options:
        raise CommandError("torch.distributed.launch: --no-python needs --use-env: add --use-env")
    if "no-python" in options and "module" in options and "run-path" not in options:
        raise CommandError("torchrun: --no-python and --module contradict each other: remove one of them")


def _parser(variables: Mapping[str, str], is_launch: bool) -> ArgumentParser:
    """Return a parser with torchrun's options: argparse has its rules of abbreviations and attached values."""
    import argparse  # the fork server imports this module, and workers are its forks

    program = "torch.distributed.launch" if is_launch else "torchrun"

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            error = AmbiguousOptionError if message.startswith("ambiguous option") else CommandError
            raise error(f"{program}: {message}")

    parser = Parser(prog=program, add_help=False, argument_default=argparse.SUPPRESS)
    for option in TORCHRUN_OPTIONS.values():
        if option.name == "use-env" and not is_launch:
            continue
        names = dict.fromkeys((f"--{option.name}", f"--{option.name.replace('-', '_')}"))
        flags = [*([f"-{option.short}"] if option.short else []), *names]
        default = variables.get(option.variable, argparse.SUPPRESS)
        if option.parse is None:
            parser.add_argument(*flags, action="store_true", default=_switch(option.variable, default))
        else:
            parser.add_argument(*flags, type=option.parse, choices=option.choices, default=default)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _switch(variable: str, default: str) -> bool | str:
    """Return the default of a switch: torchrun's variable for it is a number, and 0 is off."""
    import argparse

    if default == argparse.SUPPRESS:
        return default
    try:
        return bool(int(default))
    except ValueError:
        raise CommandError(f"{variable}={default}: set it to 0 or 1") from None


def check_options(options: Mapping[str, str]) -> str:
    """Return a line about the options that have no effect ("" without one); CommandError for one that is refused."""
    uses = [TORCHRUN_OPTIONS[name] for name in options if name in TORCHRUN_OPTIONS]
    for option in uses:
        if option.use is OptionUse.REFUSED:
            raise CommandError(f"torchrun option --{option.name} is not supported: {option.reason}")
    replaced = [f"--{option.name} ({option.reason})" for option in uses if option.use is OptionUse.REPLACED]
    return f"torchrun options without effect: {', '.join(replaced)}" if replaced else ""

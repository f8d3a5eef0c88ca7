"""Parse the user's command line: Python that the fork server can run, torchrun, or another program. Pure.

`torchrun [options] script args` means: run the script under this agent, as torchrun would have started it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

_PYTHON = re.compile(r"(python|pypy)(\d(\.\d+)?)?$")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")

_FLAGS = frozenset("bBdEIOPqsSu")
"""Interpreter flags that the fork server can be started with."""
_FLAGS_WITH_VALUE = frozenset("WX")

_TORCHRUN_SWITCHES = re.compile(
    r"--(standalone|no[-_]python|module|run[-_]path|virtual[-_]local[-_]rank)$|-m$"
    r"|--[a-z_-]+=|-[rt]."  # an attached value
)
"""Options of torchrun whose value, if any, is not the next argument."""


_SHORT_OPTIONS = {"-r": "redirects", "-t": "tee", "-m": "module"}


class ProgramMode(str, Enum):
    """How Python finds the program: a file, `-m` or `-c`."""

    SCRIPT = "script"
    MODULE = "module"
    CODE = "code"


@dataclass(frozen=True)
class PythonCommand:
    """`interpreter *flags (target | -m target | -c target) *args`."""

    interpreter: str
    flags: tuple[str, ...]
    mode: ProgramMode
    target: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        option = {ProgramMode.SCRIPT: (), ProgramMode.MODULE: ("-m",), ProgramMode.CODE: ("-c",)}[self.mode]
        return (self.interpreter, *self.flags, *option, self.target, *self.args)


@dataclass(frozen=True)
class PlainCommand:
    """A command that starts by exec."""

    argv: tuple[str, ...]
    reason: str
    """Why the fork server cannot run it."""
    starts_python: bool = True
    """Whether the fork server could run Python that this command starts."""


UserCommand: TypeAlias = PythonCommand | PlainCommand


def parse_command(argv: Sequence[str], torchrun_python: str = "python3") -> UserCommand:
    """Return the command of each worker. `torchrun_python` is the interpreter of this machine's `torchrun`."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return _parse_torchrun(argv, argv[1:], torchrun_python, ("-u",))
    if not _PYTHON.match(name):
        return PlainCommand(tuple(argv), f"{name} is not Python")
    command = _parse_python(argv)
    if isinstance(command, PythonCommand) and is_torchrun(command):
        return _parse_torchrun(argv, command.args, command.interpreter, (*command.flags, "-u"))
    return command


def parse_own_agent_command(argv: Sequence[str], torchrun_python: str = "python3") -> UserCommand:
    """Return the command to run once on a node whose command is an elastic agent itself, such as torchrun."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return PythonCommand(torchrun_python, ("-u",), ProgramMode.MODULE, TORCHRUN_MODULES[0], tuple(argv[1:]))
    if _PYTHON.match(name):
        return _parse_python(argv)
    return PlainCommand(tuple(argv), f"{name} is not Python")


def is_torchrun(command: PythonCommand) -> bool:
    """Return whether the command runs torchrun itself."""
    return command.mode is ProgramMode.MODULE and command.target in TORCHRUN_MODULES


def _parse_python(argv: Sequence[str]) -> UserCommand:
    """Parse Python's own command line.

    Flags may be joined (`-Bu`). The value of `-m`, `-c` and of flags with a value may be attached (`-mpkg`).
    """
    flags: list[str] = []
    rest = list(argv[1:])
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            return PythonCommand(argv[0], tuple(flags), ProgramMode.SCRIPT, argument, tuple(rest))
        letters = argument[1:]
        plain = len(letters) - len(letters.lstrip("".join(_FLAGS)))
        if letters[:plain]:
            flags.append(f"-{letters[:plain]}")
        option, attached = letters[plain : plain + 1], letters[plain + 1 :]
        if not option and plain:
            continue
        if option not in _FLAGS_WITH_VALUE | {"m", "c"} or not (attached or rest):
            return PlainCommand(
                tuple(argv), f"the fork server does not support the interpreter flag {argument}", starts_python=False
            )
        value = attached or rest.pop(0)
        if option in _FLAGS_WITH_VALUE:
            flags += [f"-{option}", value]
            continue
        return PythonCommand(
            argv[0], tuple(flags), ProgramMode.MODULE if option == "m" else ProgramMode.CODE, value, tuple(rest)
        )
    return _without_script(argv)


def _without_script(argv: Sequence[str]) -> PlainCommand:
    return PlainCommand(tuple(argv), "the command names no script", starts_python=False)


def torchrun_options(argv: Sequence[str]) -> dict[str, str]:
    """Return the torchrun options of a command by their long names; {} if the command does not run torchrun."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return _split_torchrun(argv[1:])[0]
    command = _parse_python(argv) if _PYTHON.match(name) else None
    if isinstance(command, PythonCommand) and is_torchrun(command):
        return _split_torchrun(command.args)[0]
    return {}


def _split_torchrun(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return torchrun's options (the value of a switch is empty) and the arguments after them."""
    rest, options = list(arguments), dict[str, str]()
    while rest and rest[0].startswith("-"):
        argument = rest.pop(0)
        if argument == "--":
            break
        option, attached, value = argument.partition("=")
        if argument[:2] in ("-r", "-t") and len(argument) > 2:
            option, value = argument[:2], argument[2:]
        elif not attached and not _TORCHRUN_SWITCHES.match(argument):
            value = rest.pop(0) if rest else ""
        options[_SHORT_OPTIONS.get(option, option.lstrip("-").replace("_", "-"))] = value
    return options, rest


def _parse_torchrun(argv: Sequence[str], arguments: Sequence[str], python: str, flags: tuple[str, ...]) -> UserCommand:
    """Return the program that torchrun would start. This agent implements all of torchrun's options."""
    options, rest = _split_torchrun(arguments)
    if not rest:
        return _without_script(argv)
    if "no-python" in options:
        return PlainCommand(tuple(rest), "torchrun --no-python")
    mode = ProgramMode.MODULE if "module" in options else ProgramMode.SCRIPT
    return PythonCommand(python, flags, mode, rest[0], tuple(rest[1:]))

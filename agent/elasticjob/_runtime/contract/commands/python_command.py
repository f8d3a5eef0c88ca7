"""Command lines of workers: Python, or another program. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from string import Template
from typing import TypeAlias

_PYTHON = re.compile(r"(python|pypy)(\d(\.\d+)?)?$")
_VARIABLE = re.compile(r"\$(\$|\(([^()]*)\))")

_FLAGS = frozenset("bBdEIOPqsSu")
"""Interpreter flags that the fork server can be started with."""
_FLAGS_WITH_VALUE = frozenset("WX")


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
    has_macros: bool = False
    """Whether target and args have torchrun's macro `${local_rank}`, which each worker replaces."""

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
    has_macros: bool = False
    """As `PythonCommand.has_macros`, in the arguments after the program."""


UserCommand: TypeAlias = PythonCommand | PlainCommand


def is_python(program: str) -> bool:
    """Return whether the path of a program names a Python interpreter."""
    return _PYTHON.match(base_name(program)) is not None


def base_name(program: str) -> str:
    """Return the last part of a program's path."""
    return program.rsplit("/", 1)[-1]


def parse_python_command(argv: Sequence[str]) -> UserCommand:
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
    return command_without_script(argv)


def command_without_script(argv: Sequence[str]) -> PlainCommand:
    """Return the command unchanged, with this reason: it starts by exec, and its own program reports the mistake."""
    return PlainCommand(tuple(argv), "the command names no script", starts_python=False)


def with_local_rank(command: UserCommand, local_rank: str) -> UserCommand:
    """Return the command of one worker: torchrun's macros are replaced, as torchrun does it (`$$` is a dollar sign)."""
    if not command.has_macros:
        return command

    def replaced(arguments: Sequence[str]) -> tuple[str, ...]:
        return tuple(Template(argument).safe_substitute(local_rank=local_rank) for argument in arguments)

    if isinstance(command, PlainCommand):
        return replace(command, argv=(command.argv[0], *replaced(command.argv[1:])), has_macros=False)
    target, *args = replaced((command.target, *command.args))
    return replace(command, target=target, args=tuple(args), has_macros=False)


def expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does: `$$` is a dollar sign, and an unknown name stays unchanged."""
    return _VARIABLE.sub(lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), text)

"""Reading the user's command line: is it Python that a warm process can run, torchrun, or something else. Pure.

`torchrun [options] script args` means: run the script under this agent, which is what torchrun would have started.
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
"""Interpreter flags that the warm process gets too."""
_FLAGS_WITH_VALUE = frozenset("WX")

_TORCHRUN_SWITCHES = re.compile(
    r"--(standalone|no[-_]python|module|run[-_]path|virtual[-_]local[-_]rank)$|-m$"
    r"|--[a-z_-]+=|-[rt]."  # an attached value
)
"""Options of torchrun that do not take the next word."""


_SHORT = {"-r": "redirects", "-t": "tee", "-m": "module"}


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
    """Anything else: started by exec."""

    argv: tuple[str, ...]
    reason: str
    """Why no warm process can run it."""
    starts_python: bool = True
    """Whether Python that it may start could be warm."""


UserCommand: TypeAlias = PythonCommand | PlainCommand


def parse_command(argv: Sequence[str], torchrun_python: str = "python3") -> UserCommand:
    """What to run in each worker. `torchrun_python` is the interpreter that `torchrun` on this machine belongs to."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return _read_torchrun(argv, argv[1:], torchrun_python, ("-u",))
    if not _PYTHON.match(name):
        return PlainCommand(tuple(argv), f"{name} is not Python")
    command = _read_python(argv)
    if isinstance(command, PythonCommand) and is_torchrun(command):
        return _read_torchrun(argv, command.args, command.interpreter, (*command.flags, "-u"))
    return command


def parse_own_agent_command(argv: Sequence[str], torchrun_python: str = "python3") -> UserCommand:
    """What to run once on a node whose command runs an agent of its own: a torchrun, if it is one, starts warm."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return PythonCommand(torchrun_python, ("-u",), ProgramMode.MODULE, TORCHRUN_MODULES[0], tuple(argv[1:]))
    if _PYTHON.match(name):
        return _read_python(argv)
    return PlainCommand(tuple(argv), f"{name} is not Python")


def is_torchrun(command: PythonCommand) -> bool:
    """Whether it runs torchrun itself."""
    return command.mode is ProgramMode.MODULE and command.target in TORCHRUN_MODULES


def _read_python(argv: Sequence[str]) -> UserCommand:
    """Python's own command line: flags may be joined (`-Bu`); `-m`, `-c` and value flags may have theirs attached."""
    flags: list[str] = []
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return PythonCommand(argv[0], tuple(flags), ProgramMode.SCRIPT, word, tuple(rest))
        letters = word[1:]
        plain = len(letters) - len(letters.lstrip("".join(_FLAGS)))
        if letters[:plain]:
            flags.append(f"-{letters[:plain]}")
        option, attached = letters[plain : plain + 1], letters[plain + 1 :]
        if not option and plain:
            continue
        if option not in _FLAGS_WITH_VALUE | {"m", "c"} or not (attached or rest):
            return PlainCommand(tuple(argv), f"no warm process for the interpreter flag {word}", False)
        value = attached or rest.pop(0)
        if option in _FLAGS_WITH_VALUE:
            flags += [f"-{option}", value]
            continue
        return PythonCommand(
            argv[0], tuple(flags), ProgramMode.MODULE if option == "m" else ProgramMode.CODE, value, tuple(rest)
        )
    return PlainCommand(tuple(argv), "it names no script", False)


def torchrun_options(argv: Sequence[str]) -> dict[str, str]:
    """Torchrun's options with a value in a command, by their long names; {} where it is another's."""
    name = argv[0].rsplit("/", 1)[-1]
    if name == "torchrun":
        return _split_torchrun(argv[1:])[0]
    command = _read_python(argv) if _PYTHON.match(name) else None
    if isinstance(command, PythonCommand) and is_torchrun(command):
        return _split_torchrun(command.args)[0]
    return {}


def _split_torchrun(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options (switches have no value), and what follows them."""
    rest, options = list(words), dict[str, str]()
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        option, attached, value = word.partition("=")
        if word[:2] in ("-r", "-t") and len(word) > 2:
            option, value = word[:2], word[2:]
        elif not attached and not _TORCHRUN_SWITCHES.match(word):
            value = rest.pop(0) if rest else ""
        options[_SHORT.get(option, option.lstrip("-").replace("_", "-"))] = value
    return options, rest


def _read_torchrun(argv: Sequence[str], words: Sequence[str], python: str, flags: tuple[str, ...]) -> UserCommand:
    """The program behind torchrun's own options, all of which this agent answers for."""
    options, rest = _split_torchrun(words)
    module, no_python = "module" in options, "no-python" in options
    if not rest:
        return PlainCommand(tuple(argv), "it names no script", False)
    if no_python:
        return PlainCommand(tuple(rest), "torchrun --no-python")
    mode = ProgramMode.MODULE if module else ProgramMode.SCRIPT
    return PythonCommand(python, flags, mode, rest[0], tuple(rest[1:]))

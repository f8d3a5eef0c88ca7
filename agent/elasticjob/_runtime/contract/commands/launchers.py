"""Launchers other than torchrun in a training command: which ones elasticjob replaces, and which ones it refuses. Pure.

The operator, `elasticjob run`, the agent and the converter read these tables. What the words of a command do not show
(a script file, an own program) is noticed when the launcher starts below a worker: `in_workers/sitecustomize.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elasticjob._runtime.contract.commands.python_command import (
    ProgramMode,
    PythonCommand,
    base_name,
    is_python,
    parse_python_command,
)
from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.contract.names import Backend

SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")
REPLACED_LAUNCHERS = (
    "torchrun",
    "accelerate",
    "accelerate-launch",
    "axolotl",
    "composer",
    "deepspeed",
    "fabric",
    "llamafactory-cli",
    "swift",
    "trl",
    "tune",
)
"""Programs whose ranks the agent of the pod starts in their place, so that nprocPerNode counts the ranks."""


@dataclass(frozen=True)
class RefusedLauncher:
    """A launcher that elasticjob does not run."""

    name: str
    instead: str
    """What to write instead, after `NAME `."""
    modules: tuple[str, ...] = ()
    """Its modules, for `python -m`."""
    is_mpi: bool = False
    """Whether it starts any program, of which one process is a worker like any other."""


_MPI = (
    "starts ranks of its own, which the job does not restart: write the program behind it as the command, such as"
    " [python3, train.py], and its number of processes in each pod as spec.nprocPerNode"
)
REFUSED_LAUNCHERS: Mapping[str, RefusedLauncher] = {
    launcher.name: launcher
    for launcher in (
        *(RefusedLauncher(name, _MPI, is_mpi=True) for name in ("mpirun", "mpiexec", "orterun", "srun")),
        RefusedLauncher(
            "hyperpodrun",
            "is an elastic agent of its own: write torchrun in its place",
            ("hyperpod_elastic_agent.run",),
        ),
        RefusedLauncher(
            "ft_launcher",
            "is an elastic agent of its own: write torchrun in its place, without its --ft-* options; spec.hangPolicy"
            " has a time-out for a rank that makes no progress, and spec.failurePolicy the number of restarts",
            ("nvidia_resiliency_ext.fault_tolerance.launcher",),
        ),
    )
}
"""By the name of the program."""

_WRAPPERS = ("exec", "time", "nohup", "env", "command")
"""Programs before a program that may stand without options."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_CONTROL = ("if", "case", "while", "until", "for", "select", "function", "{", "(", "[[")
_AFTER_TRAINING = ("echo", "printf", "wait", "exit", "sleep", "true", "date", "touch", "sync", "cp", "mv", "rm")
"""Commands that may follow the training in a script."""
_SUBSTITUTION = re.compile(r"\$\([^()`]*\)|`[^`]*`")
_ONE_PROCESS = re.compile(r"--?(n|np|c|ntasks)(=1|1)?$")


def find_refused_launcher(command: Sequence[str]) -> str:
    """Return why elasticjob does not run this command, in one sentence; empty if its words show no such launcher.

    In the script of `bash -c`, only the last command counts, and only if no condition decides whether it runs.
    """
    script = shell_script(command)
    words = list(command) if script is None else _last_command(script)
    while words and (words[0] in _WRAPPERS or _ASSIGNMENT.match(words[0])):
        del words[0]
    if not words:
        return ""
    launcher = REFUSED_LAUNCHERS.get(base_name(words[0])) or _run_as_module(words)
    if launcher is None or (launcher.is_mpi and _starts_one_process(words[1:])):
        return ""
    return f"{launcher.name} {launcher.instead}"


def check_launcher(command: Sequence[str], backend: Backend) -> None:
    """Raise CommandError for a launcher that elasticjob does not run. With `backend: c10d`, the command is an agent."""
    if backend is Backend.ELASTICJOB and (refused := find_refused_launcher(command)):
        raise CommandError(refused)


def shell_script(command: Sequence[str]) -> str | None:
    """Return the script of `bash -c SCRIPT`; None for any other command."""
    if not command or base_name(command[0]) not in SHELLS:
        return None
    for i, word in enumerate(command[1:-1], start=1):
        if not word.startswith("-"):
            return None
        if not word.startswith("--") and word.endswith("c"):
            return command[i + 1]
    return None


def _run_as_module(words: Sequence[str]) -> RefusedLauncher | None:
    parsed = parse_python_command(words) if is_python(words[0]) else None
    if not isinstance(parsed, PythonCommand) or parsed.mode is not ProgramMode.MODULE:
        return None
    return next((known for known in REFUSED_LAUNCHERS.values() if parsed.target in known.modules), None)


def _starts_one_process(words: Sequence[str]) -> bool:
    for number, word in enumerate(words):
        if (found := _ONE_PROCESS.match(word)) and (found[2] or words[number + 1 : number + 2] == ["1"]):
            return True
        if is_python(word):
            return False
    return False


def _last_command(script: str) -> list[str]:
    """Return the words of the command that trains at the end of a script; [] if they depend on more than the words."""
    text = _SUBSTITUTION.sub("x", re.sub(r"^\s*#.*$", "", script.replace("\\\n", " "), flags=re.MULTILINE))
    if "$(" in text or "`" in text or "<<" in text:
        return []
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters = " \t\r", ""
    try:
        pipelines = list(_pipelines(lexer))
    except ValueError:
        return []
    while pipelines and pipelines[-1][0] in _AFTER_TRAINING:
        del pipelines[-1]
    if any(words[0] in _CONTROL or "||" in words for words in pipelines):
        return []
    return pipelines[-1] if pipelines else []


def _pipelines(tokens: shlex.shlex) -> Iterator[list[str]]:
    """Yield the commands of a script, each with the words of the first program of its pipeline, and `||` if it has one.

    Programs behind a single `|` are left out.
    """
    words, is_first = list[str](), True
    for word in tokens:
        if not word.strip(";&\n"):
            if words:
                yield words
            words, is_first = [], True
        elif word == "|":
            is_first = False
        elif is_first or word == "||":
            words.append(word)
            is_first = True
    if words:
        yield words

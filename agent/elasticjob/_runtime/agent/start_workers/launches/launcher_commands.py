"""Which commands may start a launcher: only those run once in a pod until it is known whether they do.

The words do not decide how the command runs, because what a launcher does is noticed when it starts. They keep away
what must start all its ranks at once although it never comes to Python, such as a trainer in C++.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from elasticjob._runtime.agent.start_workers.command import PlainCommand, PythonCommand, UserCommand
from elasticjob._runtime.contract.commands.launchers import SHELLS
from elasticjob._runtime.contract.commands.python_command import ProgramMode, base_name
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file

_LAUNCHERS = re.compile(
    r"(?:^|[\s;&|(/\"'])(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate(?:-launch)?|axolotl|trl"
    r"|(?:tune|fabric)\s+run|llamafactory-cli|swift)(?=$|[\s;&|)\"'])"
)
_MEANS_IT = "ALLOW_SEPARATE_WORLDS"
_MAX_SCRIPT = 1 << 20
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.", "deepspeed.", "composer.", "axolotl.", "trl.", "swift.")
_HELPERS = ("pip", "venv", "ensurepip", "virtualenv", "uv")
"""Modules that prepare an environment, and are no rank."""


def may_start_launcher(command: UserCommand, env: Mapping[str, str]) -> bool:
    """Return whether a pod's command names a launcher, or runs a script file that does."""
    if not isinstance(command, PlainCommand) or not command.starts_python or env.get(_MEANS_IT) == "1":
        return False
    text = "\n".join((*command.argv, _script(command.argv)))
    return _MEANS_IT not in text and _LAUNCHERS.search(_joined_lines(text)) is not None


def is_preparation(command: UserCommand) -> bool:
    """Return whether Python runs a module that starts no rank itself: a launcher, or one that installs packages."""
    if not isinstance(command, PythonCommand):
        return False
    if command.mode is not ProgramMode.MODULE:
        return False
    return command.target in _HELPERS or f"{command.target}.".startswith(_LAUNCHER_MODULES)


def _script(argv: Sequence[str]) -> str:
    """Return the text of the script file that a command runs; empty if it runs none, or a program."""
    shell = base_name(argv[0]) in SHELLS
    words = argv[1:] if shell else argv
    if shell and any(word.startswith("-") and "c" in word for word in words[:1]):
        return ""
    path = next((word for word in words if not word.startswith("-")), "")
    try:
        data = read_regular_file(path, _MAX_SCRIPT).data if path else b""
    except OSError:
        return ""
    first = data.partition(b"\n")[0].decode(errors="replace").split()
    is_script = shell or (first[:1] and first[0].startswith("#!") and base_name(first[-1].removeprefix("#!")) in SHELLS)
    return data.decode(errors="replace") if is_script else ""


def _joined_lines(text: str) -> str:
    return text.replace("\\\n", " ")

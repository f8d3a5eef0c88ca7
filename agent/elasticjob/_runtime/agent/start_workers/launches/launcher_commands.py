"""Which commands may start a launcher: only those run once in a pod until it is known whether they do.

The words do not decide how the command runs, because what a launcher does is noticed when it starts. They keep away
what must start all its ranks at once although it never reaches Python, such as a trainer in C++.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from elasticjob._runtime.agent.start_workers.command import PlainCommand, UserCommand
from elasticjob._runtime.contract.commands.launchers import SHELLS
from elasticjob._runtime.contract.commands.python_command import base_name
from elasticjob._runtime.contract.shared_memory.untrusted_file import read_regular_file

_LAUNCHERS = re.compile(
    r"(?:^|[\s;&|(/\"'])(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate(?:-launch)?|axolotl|trl"
    r"|(?:tune|fabric)\s+run|llamafactory-cli|swift|deepspeed\.launcher\.(?:runner|launch)|composer\.cli\.launcher)"
    r"(?=$|[\s;&|)\"'])"
)
_FRAMEWORKS = re.compile(
    r"(?:^|[\n;&|(]|\b(?:exec|run|then|do|else|time|env)\s|\b(?:numactl|nice|taskset)\s(?:[^\n;&|p]|p(?!ython))*?\s)"
    r"\s*(?:\w+=\S*\s+)*(?:[^\s;&|]*/)?(?:deepspeed|composer)\s+\S"
)
"""Launchers with the names of packages, which are values of options too (`--strategy deepspeed`): as programs."""
_MEANS_IT = "ALLOW_SEPARATE_WORLDS"
_MAX_SCRIPT = 1 << 20


def may_start_launcher(command: UserCommand, env: Mapping[str, str]) -> bool:
    """Return whether a pod's command names a launcher, or runs a script file that does."""
    if not isinstance(command, PlainCommand) or not command.starts_python or env.get(_MEANS_IT) == "1":
        return False
    text = "\n".join((*command.argv, _script(command.argv)))
    text = _joined_lines(text)
    return _MEANS_IT not in text and any(known.search(text) for known in (_LAUNCHERS, _FRAMEWORKS))


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

"""Commands that start torchrun for one of several known nodes become a plain torchrun. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from elasticjob._runtime.contract.commands.launchers import SHELLS
from elasticjob._runtime.contract.commands.python_command import base_name
from elasticjob._runtime.contract.commands.torchrun_command import TORCHRUN_OPTIONS
from elasticjob.convert.parts.fields import JsonObject

_SHELL_SYNTAX = re.compile(r"[$`;&|<>()*?\[\]{}#~!\n]")
"""What a shell does more with than to split words."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PLACE = (
    "local-addr", "master-addr", "master-port", "node-rank", "rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id",
)  # fmt: skip
"""Options of torchrun that say which node this is and where the others are."""
_HYPERPOD = "hyperpodrun"
_OWN_AGENTS = (_HYPERPOD, "ft_launcher")
"""Launchers with torchrun's options, and some of their own."""
_FT_PREFIX = "ft-"
"""Of the options that only ft_launcher has; each has a value."""
_HYPERPOD_OPTIONS = (
    "server-host", "server-port", "server-log-level", "server-shutdown-timeout", "pre-train-script", "pre-train-args",
    "post-train-script", "post-train-args",
)  # fmt: skip
"""Options that hyperpodrun has and torchrun has not; each has a value."""


def plain_command(container: JsonObject, env: Mapping[str, str]) -> tuple[JsonObject, list[str]]:
    """Return the container with a plain torchrun as its command, and the options of hyperpodrun that are left out.

    A shell whose script only starts torchrun is left out too. Any other command stays. `env`: variables of the
    container, as far as the manifest has their values.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not all(isinstance(word, str) for word in words):
        return container, []
    own = _script_words(words, env) or words
    program = base_name(own[0]) if own else ""
    if program == _HYPERPOD:
        own = ["torchrun", *own[1:]]
    elif program != "torchrun" or own is words:
        return container, []
    kept, _ = _without(own[1:], _PLACE)
    kept, lost = _without(kept, _HYPERPOD_OPTIONS)
    rest = {name: value for name, value in container.items() if name != "args"}
    return {**rest, "command": [own[0], *kept]}, list(lost)


def as_torchrun(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command with torchrun in place of hyperpodrun or ft_launcher, and the options that only these have.

    Any other command stays. The options have their values by their long names, such as `--ft-rank-heartbeat-timeout`.
    """
    if base_name(words[0]) not in _OWN_AGENTS:
        return list(words), {}
    kept, own = _without(words[1:], _HYPERPOD_OPTIONS)
    return ["torchrun", *kept], own


def _script_words(words: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """Return the words of a script that only starts torchrun or hyperpodrun; None for any other command."""
    if len(words) != 3 or base_name(words[0]) not in SHELLS or not re.fullmatch(r"-[a-z]*c", words[1]):
        return None
    script = re.sub(r"^exec\s+", "", words[2].replace("\\\n", " ").strip())
    if "\n" in script:  # a second command, which shlex would take for arguments of the first
        return None
    try:
        found = shlex.split(script)
    except ValueError:
        return None
    if not found or base_name(found[0]) not in ("torchrun", _HYPERPOD):
        return None
    options, _ = _without(found[1:], _PLACE)
    expanded = [_VARIABLE.sub(lambda m: env.get(m[1] or m[2], m[0]), word) for word in options]
    if any(_SHELL_SYNTAX.search(word) for word in expanded):
        return None
    # A variable may stand for several words, and in single quotes for itself.
    is_simple = all(
        not re.search(r"\s", env.get(m[1] or m[2], "")) for word in options for m in _VARIABLE.finditer(word)
    )
    return [found[0], *expanded] if is_simple and "'" not in script else None


def _without(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words without these options and those of ft_launcher before the program, and the options' values."""
    kept, found, rest = list[str](), dict[str, str](), list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if word.startswith("--") and (name in names or name.startswith(_FT_PREFIX)):
            found[f"--{name}"] = value if equals or not rest else rest.pop(0)
            continue
        kept.append(word)
        if not equals and rest and not rest[0].startswith("-") and name not in _FLAGS:
            kept.append(rest.pop(0))
    return [*kept, *rest], found


_FLAGS = ("m", *(option.name for option in TORCHRUN_OPTIONS.values() if option.parse is None))
"""Options of torchrun without a value; after -m comes the program."""

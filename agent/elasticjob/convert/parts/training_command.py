"""The command of a training container: torchrun's options in it become fields of the job. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticjob._runtime.contract.commands.launchers import (
    REPLACED_LAUNCHERS,
    find_refused_launcher,
    shell_script,
)
from elasticjob._runtime.contract.commands.python_command import base_name, expand_variables
from elasticjob._runtime.contract.commands.torchrun_command import (
    NPROC_PER_NODE,
    TORCHRUN_OPTIONS,
    CommandError,
    OptionUse,
    TorchrunCommand,
    parse_torchrun,
    torchrun_call,
)
from elasticjob.convert.parts.fields import Notes
from elasticjob.convert.parts.node_command import as_torchrun

_NNODES, _MAX_RESTARTS, _USE_ENV = "nnodes", "max-restarts", "use-env"
_READ = (NPROC_PER_NODE, _NNODES, _MAX_RESTARTS)
_OTHER_LAUNCHERS = ("horovodrun", "colossalai")
_HEARTBEAT = "--ft-rank-heartbeat-timeout"
_VARIABLE = re.compile(r"\$\([A-Za-z_][A-Za-z0-9_.-]*\)")
_SHELL_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SHELL_TORCHRUN = re.compile(
    r"(?:^|[\s;&|(/])(?:torchrun|python[0-9.]*\s(?:\S+\s+)*?-m\s+torch\.distributed\.(?:run|launch))\s"
)


@dataclass(frozen=True)
class TrainingCommand:
    """What the command of a container says."""

    command: list[str] | None
    args: list[str] | None
    uses_torchrun: bool = False
    """Whether torchrun starts the workers."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of torchrun's options: nproc-per-node, nnodes and max-restarts, with the container's variables expanded."""
    starts_workers: bool = False
    """Whether a launcher that elasticjob does not know starts the workers."""
    becomes_rank: bool = False
    """Whether another launcher than torchrun becomes the rank that it runs in."""
    progress_timeout: int | None = None
    """Seconds without progress after which the command's own agent would have restarted the workers."""


def read_command(
    command: list[str] | None, args: list[str] | None, env: Mapping[str, str], path: str, notes: Notes
) -> TrainingCommand:
    """Read a container's command; torchrun's options that have no effect are removed from it.

    `env`: variables of the container, as far as the manifest has their values. `path`: that of the container.
    """
    words = [*(command or ()), *(args or ())]
    where = f"{path}.{'command' if command else 'args'}"
    if not command or not all(isinstance(word, str) for word in words):
        return TrainingCommand(command, args)  # the check of the whole job has a sentence for it
    plain, own_options = as_torchrun(words)
    if plain != words:
        notes.add(where, _about_own_agent(base_name(words[0]), own_options))
        found = _read_torchrun(plain, None, plain, env, where, notes)
        return replace(found, progress_timeout=_seconds(own_options.get(_HEARTBEAT, "")))
    if refused := find_refused_launcher(words):
        notes.add(where, refused)
        return TrainingCommand(command, args, starts_workers=True)
    if (script := shell_script(words)) is not None:
        return _read_shell(command, args, script, env, where, notes)
    call = torchrun_call(words)
    if call is not None and call[2]:
        return _read_torchrun(command, args, words, env, where, notes)
    program = base_name(words[0])
    if program in _OTHER_LAUNCHERS:
        notes.add(
            where,
            f"{program} starts workers of its own: write the training script as the command, such as"
            " [python3, train.py], and nprocPerNode, the number that elasticjob starts in each pod",
        )
    return TrainingCommand(
        command,
        args,
        starts_workers=program in _OTHER_LAUNCHERS,
        becomes_rank=program in REPLACED_LAUNCHERS,
    )


def _about_own_agent(program: str, options: Mapping[str, str]) -> str:
    text = f"{program} is an elastic agent of its own: torchrun is in its place"
    lost = [name for name in options if name != _HEARTBEAT]
    if _HEARTBEAT in options:
        text += f"; {_HEARTBEAT} is spec.hangPolicy.progressTimeoutSeconds, the longest time without a step"
    return f"{text}; {', '.join(lost)} without effect" if lost else text


def _seconds(text: str) -> int | None:
    """Return the number of seconds, rounded up; None if it is no number."""
    try:
        return math.ceil(float(text))
    except (ValueError, OverflowError):
        return None


def _read_torchrun(
    command: list[str],
    args: list[str] | None,
    words: list[str],
    env: Mapping[str, str],
    path: str,
    notes: Notes,
) -> TrainingCommand:
    call = torchrun_call(words)
    assert call is not None  # noqa: S101
    _, is_launch, arguments = call
    try:
        parsed = _parse(arguments, is_launch=is_launch)
    except CommandError as error:
        notes.add(path, f"torchrun's options are not read: {error}")
        return TrainingCommand(command, args, uses_torchrun=True)
    found = {name: expand_variables(parsed.options[name], env) for name in _READ if name in parsed.options}
    removed = _removed_options(parsed, found, path, notes)
    if not removed:
        return TrainingCommand(command, args, uses_torchrun=True, options=found)
    kept = [
        f"--{name}={value}" if TORCHRUN_OPTIONS[name].parse is not None else f"--{name}"
        for name, value in parsed.options.items()
        if name not in removed
    ]
    own = words[: len(words) - len(arguments)]
    script_args = parsed.args[1:] if is_launch and _USE_ENV not in parsed.options else parsed.args
    rewritten = [*own, *kept, parsed.program, *script_args]
    return TrainingCommand(rewritten, None, uses_torchrun=True, options=found)


def _removed_options(parsed: TorchrunCommand, found: Mapping[str, str], path: str, notes: Notes) -> list[str]:
    """Return the options to remove, and add notes about those that a field of the job does not replace."""
    removed = []
    for name in parsed.options:
        option = TORCHRUN_OPTIONS[name]
        is_known = name in found and "$(" not in found[name]
        if option.use is OptionUse.HONOURED and not (name == NPROC_PER_NODE and is_known):
            continue
        if option.use is OptionUse.REFUSED:
            notes.add(path, f"--{name} is removed, it is not supported: {option.reason}")
        elif not is_known:
            notes.add(path, f"--{name} is removed, it has no effect: {option.reason}")
        removed.append(name)
    return removed


def _parse(arguments: Sequence[str], *, is_launch: bool) -> TorchrunCommand:
    """Parse torchrun's arguments, in which `$(NAME)` may stand for any value, also for a number."""
    names = sorted({name for argument in arguments for name in _VARIABLE.findall(argument)})
    numbers = {name: str(900_000_000 + i) for i, name in enumerate(names)}
    parsed = parse_torchrun([_replaced(argument, numbers) for argument in arguments], {}, is_launch=is_launch)
    variables = {number: name for name, number in numbers.items()}
    return TorchrunCommand(
        {name: _replaced(value, variables) for name, value in parsed.options.items()},
        _replaced(parsed.program, variables),
        tuple(_replaced(argument, variables) for argument in parsed.args),
    )


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


# ---- shell scripts ---------------------------------------------------------------------------------------------------


def _read_shell(
    command: list[str], args: list[str] | None, script: str, env: Mapping[str, str], path: str, notes: Notes
) -> TrainingCommand:
    text = script.replace("\\\n", " ")
    call = _SHELL_TORCHRUN.search(text)
    if call is None:
        return TrainingCommand(command, args)
    options = {}
    for name in _READ:
        value = _shell_option(text[call.end() - 1 :], name)
        if value is None:
            continue
        options[name] = _SHELL_VARIABLE.sub(lambda m: env.get(m[1] or m[2], m[0]), expand_variables(value, env))
        if "$" in options[name] and name == NPROC_PER_NODE:
            notes.add(path, f"--{name}={value} is known only in the container: set spec.nprocPerNode to its value")
        if "$" in options[name]:
            del options[name]
    return TrainingCommand(command, args, uses_torchrun=True, options=options)


def _shell_option(text: str, name: str) -> str | None:
    match = re.search(rf"\s--{name.replace('-', '[-_]')}[=\s]\s*(\"[^\"]*\"|'[^']*'|[^\s;&|]+)", text)
    return match[1].strip("\"'") if match else None

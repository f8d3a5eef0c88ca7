"""The number of workers per pod, from `spec.nprocPerNode`, torchrun's command and the trainer's resources. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.commands.torchrun_command import (
    NPROC_PER_NODE,
    AmbiguousOptionError,
    CommandError,
    check_options,
    parse_torchrun,
    torchrun_call,
)
from elasticjob._runtime.contract.names import Backend

MAX_WORKERS = 64
"""Most workers of a pod."""
_DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SUFFIXES = _DECIMAL | {f"{letter}i": 1024.0 ** (i + 1) for i, letter in enumerate("KMGTPE")}
_WORDS = ("auto", "gpu", "cpu")


@dataclass(frozen=True)
class WorkerCount:
    """The number of workers per pod."""

    number: int
    is_default: bool = False
    """Whether nprocPerNode leaves the number open and the manifest's command names none: a number that only the agent
    can read (a variable of the image, `$(NAME)`) counts instead."""


@dataclass(frozen=True)
class Devices:
    """What the trainer container requests; the limit wins, because Kubernetes uses it where the request is missing."""

    gpus: int
    """GPUs of any vendor, and MIG devices; not those of resource claims, whose number is unknown here."""
    cpus: int
    """Processors, rounded up."""


def requested_devices(requests: Mapping[str, Any], limits: Mapping[str, Any]) -> Devices:
    """Return the devices in a container's `resources`."""
    amounts = {**requests, **limits}
    gpus = sum(quantity(amount) for name, amount in amounts.items() if _is_gpu(name))
    return Devices(int(gpus), math.ceil(quantity(amounts.get("cpu"))))


def _is_gpu(resource: str) -> bool:
    return resource.endswith(("/gpu", "/gpu.shared")) or resource.startswith("nvidia.com/mig-")


def count_workers(
    field: int | str | None, command: Sequence[str], env: Mapping[str, str], devices: Devices, backend: Backend
) -> WorkerCount:
    """Return the number of workers per pod; CommandError if it is contradictory, or if torchrun's options are wrong.

    `field`: nprocPerNode, a number, `auto`, `gpu` or `cpu`; None as `auto`. `command`, `env`: the trainer's, as far
    as the manifest has them.
    """
    written = _number_of(str(field), devices, "nprocPerNode") if field not in (None, "auto") else None
    asked = _asked_workers(command, env, devices, backend)
    if written is not None and asked is not None and written != asked:
        raise contradiction(written, asked)
    number = written if written is not None else asked
    return WorkerCount(max(1, devices.gpus), is_default=True) if number is None else WorkerCount(number)


def contradiction(written: int, asked: int) -> CommandError:
    """Return the error for a number in the manifest and another one in the command."""
    return CommandError(
        f"nprocPerNode is {written} and the command has --nproc-per-node={asked}:"
        " remove one of them, or make them equal"
    )


def _asked_workers(command: Sequence[str], env: Mapping[str, str], devices: Devices, backend: Backend) -> int | None:
    """Return the number of workers that the command asks for; None if it names none, or none that is known here."""
    call = torchrun_call(command)
    if call is None:
        return None
    _, is_launch, arguments = call
    if backend is Backend.C10D:
        return own_torchrun_workers(command, env)
    try:
        options = parse_torchrun(arguments, env, is_launch=is_launch).options
        check_options(options)
        return named_workers(options.get(NPROC_PER_NODE, ""), devices)
    except CommandError as error:
        # The agent checks the command too: the kubelet expands `$(NAME)`, and the image's Python may know more.
        if isinstance(error, AmbiguousOptionError) or any("$(" in argument for argument in arguments):
            return None
        raise


def named_workers(text: str, devices: Devices) -> int | None:
    """Return the number that --nproc-per-node names; None if it names none; CommandError if it is not supported."""
    return None if text in ("", "auto") else _number_of(text, devices, "--nproc-per-node")


def own_torchrun_workers(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Return the number in the command of a torchrun that runs itself, or in its variable; None if it has none.

    Such a torchrun reports its own usage errors and resolves words.
    """
    call = torchrun_call(command)
    try:
        text = parse_torchrun(call[2], env, is_launch=call[1]).options.get(NPROC_PER_NODE, "") if call else ""
    except CommandError:
        return None
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_WORKERS


def _number_of(text: str, devices: Devices, name: str) -> int:
    if _is_number(text):
        return int(text)
    if text == "cpu":
        return max(1, devices.cpus)
    if text != "gpu":
        raise CommandError(f"{name} {text!r}: want a number from 1 to {MAX_WORKERS}, or {', '.join(_WORDS)}")
    if not devices.gpus:
        raise CommandError(
            f"{name} is gpu, and the trainer container requests no GPU: add resources.limits, for example"
            f" nvidia.com/gpu: 1, or set {name} to a number (the devices of a resource claim cannot be counted)"
        )
    return devices.gpus


def quantity(value: Any) -> float:
    """Return a Kubernetes quantity (`500m`, `4`, `2Gi`) as a number; 0 for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return 0.0
    number = value.rstrip("numkKMGTPEi") if isinstance(value, str) else value
    suffix = value[len(number) :] if isinstance(value, str) and isinstance(number, str) else ""
    try:
        amount = float(number) * _SUFFIXES[suffix]
    except (ValueError, KeyError, OverflowError):
        return 0.0
    return amount if math.isfinite(amount) else 0.0

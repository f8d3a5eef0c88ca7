"""Random states of this process: Python's, NumPy's, and torch's generators of the CPU and of this rank's GPU.

`capture` and `restore` use the generators' own formats, since they run at every step. `to_plain` and `from_plain`
convert these to plain values, which can be stored and sent. The generators of torch.cuda and NumPy are included only if
this process uses them.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from elasticjob.training.group_device import own_gpu

GENERATORS = ("python", "numpy", "torch", "cuda")
_SEED_BITS = 63


def capture() -> dict[str, Any]:
    """Return the states by generator."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _numpy_random()) is not None:
        states["numpy"] = numpy.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state(own_gpu())
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the generators that `states` names; those that this process does not use are left out."""
    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := _numpy_random()) is not None:
        numpy.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"], own_gpu())


def seed(generator: str, number: int) -> None:
    """Seed one generator with a number of `derive_seed`."""
    if generator == "python":
        random.seed(number)
    elif generator == "torch":
        torch.default_generator.manual_seed(number)
    elif generator == "numpy" and (numpy := _numpy_random()) is not None:
        numpy.seed(number % (1 << 32))
    elif generator == "cuda" and torch.cuda.is_initialized():
        torch.cuda.default_generators[own_gpu()].manual_seed(number)


def derive_seed(base: int, rank: int, version: tuple[int, int]) -> int:
    """Return a seed for a rank that restores a state of this version but has no random states of its own for it.

    It depends on nothing else, so that a repeated run has the same seeds. Other ranks and versions have other seeds.
    """
    digest = hashlib.sha256(json.dumps([base, rank, version]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def digests(plain: Mapping[str, Any]) -> list[int]:
    """Return a number for each of GENERATORS: equal states have equal numbers, and 0 is for an absent one."""
    return [_digest(plain[name]) if name in plain else 0 for name in GENERATORS]


def to_plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states as JSON can hold them."""
    return {name: _to_plain(name, state) for name, state in states.items()}


def from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that `to_plain` converted; ValueError, TypeError or KeyError for another content."""
    return {name: _from_plain(name, state) for name, state in plain.items()}


def _to_plain(name: str, state: Any) -> Any:
    if name == "python":
        version, words, gauss = state
        return [version, list(words), gauss]
    if name == "numpy":
        inner = {key: getattr(item, "tolist", lambda item=item: item)() for key, item in state["state"].items()}
        return {**state, "state": inner}
    return bytes(state.tolist()).hex()


def _from_plain(name: str, plain: Any) -> Any:
    if name == "python":
        version, words, gauss = plain
        return version, tuple(words), gauss
    if name == "numpy":
        return plain
    return torch.tensor(list(bytes.fromhex(plain)), dtype=torch.uint8)


def _digest(plain: Any) -> int:
    found = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()
    return int.from_bytes(found[:8], "big") >> (64 - _SEED_BITS) or 1  # 0 means absent


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")

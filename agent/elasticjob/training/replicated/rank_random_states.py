"""The random states of one rank across interruptions and restarts, and those of a rank that has none of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from elasticjob._runtime.contract.snapshot_format.state_sources import NO_VERSION, Version
from elasticjob.training import random_states, state_exchange
from elasticjob.training.random_states import GENERATORS
from elasticjob.training.replicated.live.rank_memory import RankMemory

_at_interruption: dict[str, Any] = {}


def note_interruption() -> None:
    """Keep the random states as they are now, for `State.sync`.

    The code that interrupts the main thread calls this before the training function begins again and seeds its
    generators.
    """
    _at_interruption.clear()
    _at_interruption.update(random_states.capture())


class RankRandomStates:
    """What a rank knows of its generators: its own states for one version, and what the ranks have in common."""

    def __init__(self, memory: RankMemory) -> None:
        """`memory`: keeps the states at the last commit, beyond the end of this process if an agent owns it."""
        self._memory = memory
        self._seed = torch.initial_seed()
        self._own: dict[str, Any] = {}
        self._equal = [False] * len(GENERATORS)
        """For each generator: whether all ranks had the same state at the last `sync`, as after equal seeds."""

    def find(self, version: Version, captured: Mapping[str, Any]) -> tuple[Version, tuple[int, ...]]:
        """Return version and digests of the rank's own states.

        `captured`: those of this process at `version`. Without them: those that an earlier process of this rank left in
        memory, or if there are none, the present ones, with NO_VERSION.
        """
        self._own = random_states.to_plain(captured)
        if not captured:
            version, self._own = self._read_memory()
        if not self._own:
            version, self._own = NO_VERSION, random_states.to_plain(random_states.capture())
        return version, tuple(random_states.digests(self._own))

    def store(self, version: Version, captured: Mapping[str, Any], complete: Version) -> None:
        """Write the states of this commit to the pod's memory: a new process of this rank continues with them.

        `complete`: the version of the pod's newest copy. It is what a new process loads if this commit is never
        completed.
        """
        if captured:
            self._memory.write(version, json.dumps(random_states.to_plain(captured)).encode(), protected=complete)

    def shared(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a block records for ranks without states of their own."""
        return {"seed": self._seed, "alike": self._equal, "states": random_states.to_plain(captured)}

    def set_for(
        self, version: Version, own: Version, record: Any, equal: Sequence[bool | None], *, finishes_step: bool
    ) -> None:
        """Set the generators of a rank that has loaded a block of this version.

        `own`: the version of its own states (`find`). `record`: what `shared` returned for the block; None in a block
        without random states. `finishes_step`: this process was interrupted in the step that the block completes. It
        has drawn all its numbers for that step, since the other ranks needed its gradients.
        """
        committed, states = self._read_memory(version)  # the newest may be of a commit that was not completed
        if version in (own, committed):
            if record is not None:
                self._equal = record["alike"]
            random_states.restore(random_states.from_plain(self._own if own == version else states))
        elif finishes_step:
            random_states.restore(_at_interruption)
        elif record is not None:
            self._seed, self._equal = record["seed"], record["alike"]
            self.record_equal_generators(equal)
            self._set_from_others(random_states.from_plain(record["states"]), version)

    def record_equal_generators(self, equal: Sequence[bool | None]) -> None:
        """Record which generators have equal states on all ranks at this `sync` (None: unknown, keep the last answer).

        What `note_interruption` has kept is dropped: the ranks have random states for this round now.
        """
        self._equal = [old if new is None else new for new, old in zip(equal, self._equal, strict=True)]
        _at_interruption.clear()

    def _set_from_others(self, states: Mapping[str, Any], version: Version) -> None:
        """Set the generators that are equal on all ranks to the others' states, and the rest to a seed of this rank."""
        for name, same in zip(GENERATORS, self._equal, strict=True):
            if same and name in states:
                random_states.restore({name: states[name]})
            else:
                random_states.seed(name, random_states.derive_seed(self._seed, state_exchange.rank(), version))

    def _read_memory(self, version: Version | None = None) -> tuple[Version, dict[str, Any]]:
        """Return version and states of the newest entry, or of that of `version`; NO_VERSION if there is none."""
        found, content = self._memory.read(version)
        with suppress(ValueError):
            return found, json.loads(content)
        return NO_VERSION, {}

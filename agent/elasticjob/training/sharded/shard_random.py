"""The random states of the ranks in a sharded state: each block has those of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticjob._runtime.contract.snapshot_format.state_sources import Version
from elasticjob.training import random_states
from elasticjob.training.random_states import GENERATORS


def restore_random_states(saved: Sequence[Any], seed: int, rank: int, version: Version) -> None:
    """Set this rank's generators; `saved`: the states of all ranks at that version, `seed`: theirs at first.

    A rank that the world of the commit did not have gets the states of a generator that was equal on all, as after
    equal seeds, else a new seed. That depends on rank and version only, so that a repeated run has the same one.
    """
    if rank < len(saved):
        random_states.restore(random_states.from_plain(saved[rank]))
        return
    columns = zip(*(random_states.digests(states) for states in saved), strict=True)
    for name, digests in zip(GENERATORS, columns, strict=True):
        if len(digests) > 1 and len(set(digests)) == 1 and name in saved[0]:
            random_states.restore(random_states.from_plain({name: saved[0][name]}))
        else:
            random_states.seed(name, random_states.derive_seed(seed, rank, version))

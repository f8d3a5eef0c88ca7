"""Plan a restore at the start of a round: which state all ranks load, and which rank sends it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.contract.snapshot_format.state_block import ABSENT, NO_STEP, BlockHeader

Version = tuple[int, int]
"""Sequence number and step, as `BlockHeader.version`."""
NO_VERSION: Version = ABSENT.version


@dataclass(frozen=True)
class AvailableStates:
    """What one rank has. The lists of numbers that ranks exchange have the order of the fields."""

    live: Version = NO_VERSION
    """Version of the live objects; NO_VERSION if they are not complete, or have never been."""
    memory: BlockHeader = ABSENT
    """The newest copy in the memory of the rank's pod."""
    file: BlockHeader = ABSENT
    """The copy in the file of the State. Only the first worker of each pod reads it."""
    half_changed: bool = False
    """Whether an interruption has left the live objects between two steps."""
    reached: int = NO_STEP
    """The last step that the rank has counted, if `half_changed`."""
    random: Version = NO_VERSION
    """Version to which the rank's own random states belong; NO_VERSION: they are the states as the script set them."""
    digests: tuple[int, ...] = ()
    """A number for each generator, equal for equal random states; 0: unknown."""

    def numbers(self) -> list[int]:
        """Return the fields as 64-bit integers."""
        blocks = (n for b in (self.memory, self.file) for n in (b.sequence, b.step, b.json_size, b.size))
        return [*self.live, *blocks, int(self.half_changed), self.reached, *self.random, *self.digests]

    @classmethod
    def parse(cls, numbers: Sequence[int]) -> AvailableStates:
        """Return what `numbers` was called on."""
        n = tuple(numbers)
        return cls(
            (n[0], n[1]), BlockHeader(*n[2:6]), BlockHeader(*n[6:10]), bool(n[10]), n[11], (n[12], n[13]), tuple(n[14:])
        )

    def has(self, version: Version) -> bool:
        """Return whether the rank has this state without help of others or of storage."""
        return version in (self.live, self.memory.version)


class Source(Enum):
    """Where the sending rank reads the state. Memory is first: the copy there is ready to be sent."""

    MEMORY = "memory"
    LIVE = "live"
    FILE = "file"


@dataclass(frozen=True)
class Transfer:
    """The state that all ranks restore, and how those that lack it get it."""

    version: Version
    sender: int | None
    """A rank that has the state, and broadcasts it if there are no `pairs`; None: every rank has it."""
    source: Source
    pairs: tuple[tuple[int, int], ...] = ()
    """(sender, receiver) for each rank that lacks the state, if each of them can have a sender of its own."""
    copies_first: bool = False
    """Whether senders copy their live objects to memory first: all ranks that have the state take part in the transfer,
    and none of them may survive the loss of a receiver (gloo loses operations that are under way)."""


def choose_transfer(available: Sequence[AvailableStates]) -> Transfer | None:
    """Return how all ranks get the newest state; None if no rank has any. `available` is in the order of the ranks.

    The newest version of all ranks and sources counts. A rank that has it, live or in the memory of its pod, loads
    nothing from others.
    """
    version = max(v for states in available for v in (states.live, states.memory.version, states.file.version))
    if version == NO_VERSION:
        return None
    receivers = [rank for rank, states in enumerate(available) if not states.has(version)]
    if not receivers:
        return Transfer(version, None, Source.MEMORY)
    for source in Source:
        senders = [rank for rank, states in enumerate(available) if _version(states, source) == version]
        if source is Source.FILE:
            del senders[1:]  # one rank reads the storage
        if senders:
            others = [rank for rank in receivers if rank not in senders]
            pairs = tuple(zip(senders, others, strict=False)) if len(others) <= len(senders) else ()
            copies_first = source is Source.LIVE and (not pairs or len(pairs) == len(senders))
            return Transfer(version, senders[0], source, pairs, copies_first)
    raise AssertionError("no rank has the newest version")


def lost_steps(available: Sequence[AvailableStates], transfer: Transfer) -> int:
    """Return how many steps the ranks had counted beyond the state that they restore; 0 if none is lost."""
    return max(0, *(states.reached - transfer.version[1] for states in available))


def equal_generators(available: Sequence[AvailableStates], version: Version) -> list[bool | None]:
    """Return for each generator whether all ranks that know its state for this version have the same one.

    None: fewer than two ranks know it.
    """
    known = [states.digests for states in available if states.random == version]
    columns = [[digest for digest in column if digest] for column in zip(*known, strict=True)]
    found = [len(set(column)) == 1 if len(column) > 1 else None for column in columns]
    return found or [None] * len(available[0].digests)


def _version(states: AvailableStates, source: Source) -> Version:
    versions = {Source.MEMORY: states.memory.version, Source.LIVE: states.live, Source.FILE: states.file.version}
    return versions[source]

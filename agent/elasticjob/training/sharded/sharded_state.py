"""`elasticjob.ShardedState`: the state of an FSDP2 or HSDP training loop, each shard in the memory of two pods."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from elasticjob._runtime.contract.snapshot_format.commit_sequence import CommitSequence
from elasticjob._runtime.contract.snapshot_format.state_block import (
    HEADER_SIZE,
    BlockHeader,
    data_start,
    read_content,
    read_header,
)
from elasticjob._runtime.contract.snapshot_format.state_sources import NO_VERSION, Version
from elasticjob.training import progress_channel, random_states
from elasticjob.training.devices import synchronize_device
from elasticjob.training.replicated.state_arguments import checked_step
from elasticjob.training.sharded import shard_sources
from elasticjob.training.sharded.shard_copies import ShardCopier
from elasticjob.training.sharded.shard_group import ShardGroup
from elasticjob.training.sharded.shard_layout import PLAIN_TENSORS, ShardEntry, ShardLayout
from elasticjob.training.sharded.shard_memory import BUFFERS, ShardBuffers, shard_descriptors
from elasticjob.training.sharded.shard_random import restore_random_states
from elasticjob.training.sharded.shard_reader import ShardReader
from elasticjob.training.sharded.shard_sources import NO_SHARD, StoredShard
from elasticjob.training.sharded.sharded_parts import ShardedParts
from elasticjob.training.snapshot_values.state_tree import PackedTree, unpack_tree
from elasticjob.training.state_parts import (
    check_values,
    object_refusal,
    on_device_of,
    restore_part,
    split_parts,
    state_of,
)
from elasticjob.training.update_guard import guard

log = logging.getLogger(__name__)

_OPTIONS_OF_STATE = ("path", "save_minutes", "frozen_parameters")
_TEXT_UNIT = 64 << 10
"""Bytes. The JSON of a block is filled up to a multiple, so that the data stays where it is in the next commit."""


class ShardedState:
    """Model, optimizer and other training state of ranks that each hold a shard of it, with the number of steps done.

    `commit` copies this rank's shard to memory of its pod that outlives the process, and while training continues, to
    a rank of the next pod. `sync`, at the start of every round, brings all ranks to the newest state of which every
    shard is in some pod's memory, in the layout of the present world. When a round ends on plan, all ranks commit at
    its last step.

    Models and optimizers keep their shards (DTensor). Other objects with `state_dict` and `load_state_dict`, samplers
    with `set_epoch`, and plain values must be the same on all ranks. Plain values are attributes of the ShardedState.
    Build a new model, optimizer and ShardedState in each round, before `sync`: their device mesh belongs to its process
    groups.

    Order of calls: create the process group, then the ShardedState, `sync`, and `commit` after each step or less often.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)  # with more ranks: fully_shard(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = elasticjob.ShardedState(model=model, optimizer=optimizer)
        >>> state.sync()  # there is no state yet
        False
        >>> while state.step < 3:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     state.step += 1
        ...     state.commit()
        >>> dist.destroy_process_group()
    """

    def __init__(self, *, step: int = 0, random_states: bool = True, **parts: Any) -> None:
        """Check all parts.

        Args:
            step: Number of steps done before.
            random_states: Keep those of each rank (Python, NumPy, torch). False if the script seeds at each step.
            parts: Objects and plain values by name.

        Raises:
            TypeError: A part cannot be kept, or only State has this option.
            ValueError: A part's name is reserved, or `step` is negative.
        """
        if wrong := next((name for name in _OPTIONS_OF_STATE if name in parts), ""):
            text = "only State has it; write files with torch.distributed.checkpoint"
            raise TypeError(f"ShardedState({wrong}=...): {text}")
        self._step = checked_step(step)
        self._save_random_states = random_states
        self._seed = torch.initial_seed()
        self._sequence = CommitSequence()
        self._committed: Version = NO_VERSION
        objects, values = split_parts(parts, dir(self), "ShardedState", object_refusal)
        self._parts = ShardedParts(objects)
        self._objects = {n: p for n, p in objects.items() if n not in {*self._parts.modules, *self._parts.optimizers}}
        self._values = tuple(values)
        self.__dict__.update(values)
        self._layout: ShardLayout | None = None
        self._targets: dict[int, tuple[Any, ...]] = {}
        descriptors = shard_descriptors()
        self._descriptors = descriptors
        self._own, self._peers = ShardBuffers(descriptors[:BUFFERS]), ShardBuffers(descriptors[BUFFERS:])
        self._copier: ShardCopier | None = None
        self._shard, self._shards = 0, 1
        self._packed()

    if TYPE_CHECKING:  # plain values are attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def step(self) -> int:
        """Number of steps done. An assignment, also of the same number, completes a step."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        value = checked_step(value)
        guard.check()
        self._step = value
        self._sequence.advance()
        progress_channel.heartbeat()

    def sync(self) -> bool:
        """Bring every rank to the newest complete state in the memory of the pods; return whether there was one.

        Call it on all ranks once the process group exists, before the first step. Without a state nothing changes, and
        a warning says which shards are lost, if any are. KeyError or ValueError: the state is of another model.
        """
        _make_current(self)
        group = ShardGroup()
        self._shard, self._shards = group.rank, group.size
        stored = [number for shard in self._stored() for number in shard.numbers()]
        node = int(os.environ.get("GROUP_RANK", "0"))
        gathered = group.gather_numbers([node, *stored])
        holders = shard_sources.copy_holders([row[0] for row in gathered])
        buffers = [shard_sources.parse_shards(row[1:]) for row in gathered]
        version = shard_sources.newest_complete(buffers)
        if version != NO_VERSION:
            self._restore(group, version, shard_sources.shard_places(buffers, version))
        elif (lost := shard_sources.describe_lost(buffers)) and group.rank == 0:
            log.warning("training does not continue from memory: %s", lost)
        self._sequence.adopt(shard_sources.newest_sequence(buffers))
        self._copier = _begin_copies(ShardCopier(group, holders, self._peers, version))
        self.commit()  # in the layout of this world, so that the loss of another pod is covered again
        progress_channel.report_begin(self.step)
        return version != NO_VERSION

    def commit(self) -> None:
        """Copy this rank's shard as it is now, and begin to copy it to the next pod.

        Call it on all ranks, after `sync`. It waits until the copies of the last commit exist everywhere: a lost pod
        then costs at most the step that was committed last. TypeError: a plain value cannot be kept.
        """
        if self._copier is None:
            raise RuntimeError("ShardedState.commit: call sync first, at the start of each round")
        synchronize_device()
        guard.check()
        packed = self._packed()
        tensors = self._parts.tensors()
        if self._layout is None or not self._layout.fits(tensors):
            self._layout = ShardLayout(tensors, self._parts.state_names())
        self._sequence.advance()
        self._copier.wait()
        header, view = self._write(self._layout, packed, self._copier.complete_version)
        self._committed = self._sequence.number, self._step
        self._copier.begin(header, view)

    # ---- write -------------------------------------------------------------------------------------------------------

    def _packed(self) -> PackedTree:
        """Return everything that is not sharded: the optimizers' settings are among the plain values."""
        objects = {name: state_of(part) for name, part in self._objects.items()}
        values = {name: getattr(self, name) for name in self._values}
        check_values(values, "ShardedState")
        return PackedTree(objects, {"step": self._step, **self._parts.settings(), **values}, "ShardedState")

    def _write(self, layout: ShardLayout, packed: PackedTree, protected: Version) -> tuple[BlockHeader, Any]:
        text = self._text(layout, packed)
        start = data_start(len(text))
        header = BlockHeader(self._sequence.number, self._step, len(text), start + layout.size + packed.size)
        buffer = self._own.free_buffer(protected)
        view = self._own.begin(buffer, header.size)
        view[HEADER_SIZE : HEADER_SIZE + len(text)] = text
        if layout.sources:
            with torch.no_grad():
                torch._foreach_copy_(self._targets_in(buffer, layout, view, start), layout.sources)
        packed.write(view, start + layout.size)
        self._own.finish(buffer, header)
        return header, view

    def _text(self, layout: ShardLayout, packed: PackedTree) -> bytes:
        """Return the JSON of a block."""
        kept = random_states.to_plain(random_states.capture()) if self._save_random_states else None
        plain = ShardEntry(PLAIN_TENSORS, "uint8", [packed.size], [0], [packed.size], layout.size, False, True)
        others = {
            "shard": self._shard,
            "shards": self._shards,
            "tree": packed.json,
            "plain": [asdict(plain)] if packed.size else [],
            "random": kept,
            "seed": self._seed,
        }
        text = f'{{"layout":{layout.text},{json.dumps(others)[1:]}'.encode()
        return text.ljust(-(-len(text) // _TEXT_UNIT) * _TEXT_UNIT)

    def _targets_in(self, buffer: int, layout: ShardLayout, view: Any, start: int) -> list[Any]:
        """Return tensors in the memory of a buffer, which stay the same from commit to commit."""
        known = self._targets.get(buffer)
        if known is None or known[0] is not layout or known[1] is not view or known[2] != start:
            known = self._targets[buffer] = (layout, view, start, layout.targets(view, start))
        found: list[Any] = known[3]
        return found

    # ---- read --------------------------------------------------------------------------------------------------------

    def _stored(self) -> list[StoredShard]:
        """Return what is in this rank's buffers."""
        return [_stored_shard(descriptor) for descriptor in self._descriptors]

    def _restore(self, group: ShardGroup, version: Version, places: Any) -> None:
        """Load a version from the memory of all ranks."""
        reader = ShardReader(group, self._descriptors, places)
        content = reader.content
        names = content["layout"]["names"]
        tensors = self._parts.prepare(names, reader.described())
        layout = ShardLayout(tensors, names)
        reader.check_plain_tensors(layout.sharded_parts(), self._parts.statistics())
        plain = {entry["name"]: bytearray(entry["shape"][0]) for entry in content["plain"]}
        with torch.no_grad():
            reader.load({**tensors, **{n: torch.frombuffer(b, dtype=torch.uint8) for n, b in plain.items()}})
        tree = unpack_tree(content["tree"], plain.get(PLAIN_TENSORS), 0)
        values = tree["values"]
        self._parts.restore(names, tensors, values)
        for name, part in self._objects.items():
            restore_part(part, tree["objects"][name])
        self._step = values["step"]
        own = {name: values[name] for name in self._values if name in values}
        self.__dict__.update(on_device_of(own, self.__dict__))
        self._seed = reader.contents[0]["seed"]
        if self._save_random_states and reader.contents[0]["random"] is not None:
            saved = [content["random"] for content in reader.contents]
            restore_random_states(saved, self._seed, group.rank, version)

    # ---- end of a round ----------------------------------------------------------------------------------------------

    def _commit_last_step(self) -> None:
        """Commit at the end of a planned round, and stay until all copies are made."""
        if self._copier is None:
            return
        if self._committed != (self._sequence.number, self._step):
            self.commit()
        with suppress(RuntimeError):  # ranks whose copies are made may have ended before they could confirm it
            self._copier.wait()


def _stored_shard(descriptor: int) -> StoredShard:
    """Return what is in a buffer; NO_SHARD if there is no complete block."""
    header = read_header(descriptor)
    if header.version == NO_VERSION:
        return NO_SHARD
    content: Mapping[str, Any] = read_content(descriptor, header)
    return StoredShard(header.version, content["shard"], content["shards"])


def wait_for_last_commit(state: ShardedState) -> None:
    """Wait until all copies of the last commit exist."""
    if state._copier is not None:
        state._copier.wait()


_current: weakref.ref[ShardedState] | None = None
"""The ShardedState that planned ends commit: the memory of a rank has room for one."""
_copier: ShardCopier | None = None
"""The thread of the last round, also if its ShardedState is no longer there."""


def _make_current(state: ShardedState) -> None:
    """Let planned ends commit this state, and end the copies of an earlier round of this process."""
    global _current, _copier
    if _copier is not None:
        _copier.close()
        _copier = None
    _current = weakref.ref(state)
    progress_channel.on_stop_once(_commit_current)


def _begin_copies(copier: ShardCopier) -> ShardCopier:
    global _copier
    _copier = copier
    return copier


def _commit_current() -> None:
    state = _current() if _current is not None else None
    if state is not None:
        state._commit_last_step()

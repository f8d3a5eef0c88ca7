"""`elasticjob.State`: the state of a DDP training loop, kept in host memory across rounds."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from elasticjob.contract.memory_file import memory_file
from elasticjob.training import progress_channel, state_block
from elasticjob.training.state_block import ALIGNMENT, HEADER_SIZE, BlockHeader
from elasticjob.training.state_tree import PackedTree, unpack_tree

_PIECE = 64 << 20
"""Bytes broadcast at a time; with NCCL each broadcast needs as much GPU memory."""


class State:
    """Model, optimizer and other training state, with the number of steps done.

    `commit` copies the state to memory of this node that outlives the process. `sync`, at the start of every round,
    brings all ranks to the newest copy of any node. When a round ends on plan, all ranks commit at its last step.
    Every rank must hold the same state, as under DDP: the first worker of each node keeps the copy for all of them.

    Objects with `state_dict` and `load_state_dict` are saved and restored by these methods, and samplers with
    `set_epoch` by their epoch. Everything else must be a plain value (number, text, list, dict, tensor). Plain values
    are attributes of the State.
    """

    step: int
    """Number of steps done."""

    def __init__(self, *, step: int = 0, path: str | os.PathLike[str] | None = None, **parts: Any) -> None:
        """`path`: the file that a drained node saves to, loaded if no node has a copy in memory; None: no file."""
        self.path = os.path.abspath(path) if path is not None else None  # noqa: PTH100
        self._objects = {name: part for name, part in parts.items() if _is_object(part)}
        self._values = ("step", *(name for name in parts if name not in self._objects))
        self.__dict__.update(parts, step=step)
        self._first_worker = int(os.environ.get("LOCAL_RANK", "0")) == 0
        shared = progress_channel.node_memory()
        self._shared = shared or _own_memory()
        """Memory of the node's two copies, which all its workers read."""
        self._memory = self._shared if self._first_worker else _own_memory()
        """Memory that this worker writes."""
        progress_channel.on_stop(self.commit)

    def commit(self) -> None:
        """Copy the state as it is now: a later crash loses only the steps after this call."""
        if not self._first_worker:
            return
        packed = PackedTree(self._tree())
        content = json.dumps({"path": self.path, "tree": packed.json}).encode()
        data_start = _data_start(len(content))
        memory = self._older_copy()
        header = BlockHeader(self.step, len(content), data_start + packed.size)
        view = state_block.begin_write(memory, header.size)
        view[HEADER_SIZE : HEADER_SIZE + len(content)] = content
        packed.write(view, data_start)
        state_block.finish_write(memory, header)

    def sync(self) -> None:
        """Bring every rank to the newest state in any node's memory, or if there is none, to the state in `path`.

        Call it once the process group exists, before the first step. If there is no state, nothing changes.
        """
        index, kept = state_block.newest_block(self._shared)
        saved = state_block.read_file_header(self.path) if self.path else state_block.ABSENT
        offers = _all_gather([kept.step, kept.json_size, kept.size, saved.step, saved.json_size, saved.size])
        in_memory = max(offer[0] for offer in offers) >= 0
        column = 0 if in_memory else 3
        newest = max(offer[column] for offer in offers)
        if newest >= 0:
            source = next(rank for rank, offer in enumerate(offers) if offer[column] == newest)
            header = BlockHeader(*offers[source][column : column + 3])
            if in_memory and all(offer[0] == newest for offer in offers):
                self._load(self._shared[index])
            elif _rank() == source:
                self._broadcast(self._shared[index] if in_memory else None, header, source)
            else:
                self._receive(header, source)
        progress_channel.progress(self.step)

    def save(self) -> None:
        """Commit, and write `path` now (rank 0). ValueError if the State has no path."""
        if self.path is None:
            raise ValueError("this State has no path to save to: create it with State(path=...)")
        self.commit()
        if _rank() == 0:
            state_block.save_block(self._shared[state_block.newest_block(self._shared)[0]], self.path)

    # ---- between objects and trees -----------------------------------------------------------------------------------

    def _tree(self) -> dict[str, Any]:
        objects = {name: _state_of(part) for name, part in self._objects.items()}
        return {"objects": objects, "values": {name: getattr(self, name) for name in self._values}}

    def _load(self, descriptor: int) -> None:
        header, content, view = state_block.read_block(descriptor)
        tree = unpack_tree(content["tree"], view, _data_start(header.json_size))
        for name, part in self._objects.items():
            _restore(part, tree["objects"][name])
        self.__dict__.update({name: value for name, value in tree["values"].items() if name in self._values})

    def _older_copy(self) -> int:
        """Return the memory to write to: the newest copy stays complete until the next one is."""
        index, _ = state_block.newest_block(self._memory)
        return self._memory[1 - index]

    # ---- between ranks -----------------------------------------------------------------------------------------------

    def _broadcast(self, memory: int | None, header: BlockHeader, source: int) -> None:
        """On rank `source`: broadcast the block in memory (None: in `path`) to all ranks, and load it."""
        descriptor = os.open(self.path or "", os.O_RDONLY) if memory is None else memory
        try:
            _, _, view = state_block.read_block(descriptor)
            for piece in _pieces(view, header) if _distributed() else ():
                dist.broadcast(piece.to(_device()), source)
            self._load(descriptor)
        finally:
            if memory is None:
                os.close(descriptor)

    def _receive(self, header: BlockHeader, source: int) -> None:
        """On the other ranks: receive the block into memory, and load it."""
        memory = self._older_copy()
        view = state_block.begin_write(memory, header.size)
        for piece in _pieces(view, header):
            staged = piece if _device().type == "cpu" else torch.empty_like(piece, device=_device())
            dist.broadcast(staged, source)
            if staged is not piece:
                piece.copy_(staged)
        state_block.finish_write(memory, header)
        self._load(memory)


def _own_memory() -> tuple[int, ...]:
    """Return descriptors of memory for two copies that ends with this process."""
    return tuple(memory_file(f"elasticjob-state-{i}") for i in range(2))


def _data_start(json_size: int) -> int:
    """Return the offset of the tensors in a block with that many bytes of JSON."""
    return -(-(HEADER_SIZE + json_size) // ALIGNMENT) * ALIGNMENT


def _pieces(view: Any, header: BlockHeader) -> list[Any]:
    """Return a block without its header as tensors of bytes. The receiver writes the header last."""
    data = torch.frombuffer(view, dtype=torch.uint8)[HEADER_SIZE : header.size]
    return list(data.split(_PIECE))


def _all_gather(numbers: list[int]) -> list[list[int]]:
    """Return the numbers of all ranks."""
    if not _distributed():
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.int64, device=_device())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [row.tolist() for row in gathered]


def _distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _rank() -> int:
    return int(dist.get_rank()) if _distributed() else 0


def _device() -> Any:
    """Return the device whose tensors the default process group can send."""
    cuda = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _is_object(part: Any) -> bool:
    return (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")) or hasattr(part, "set_epoch")


def _unwrap(part: Any) -> Any:
    """Return the module inside a DDP wrapper: its names lack the prefix `module.`, so any model can load them."""
    return part.module if isinstance(part, torch.nn.parallel.DistributedDataParallel) else part


def _state_of(part: Any) -> Any:
    target = _unwrap(part)
    return target.state_dict() if hasattr(target, "state_dict") else {"epoch": target.epoch}


def _restore(part: Any, state: Any) -> None:
    target = _unwrap(part)
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(state)
    else:
        target.set_epoch(state["epoch"])

"""`elasticjob.State`: what a DDP training loop must not lose, kept in host memory and handed from round to round."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from elasticjob.training import progress_channel, state_block
from elasticjob.training.state_block import ALIGNMENT, HEADER_SIZE, BlockHeader
from elasticjob.training.state_tree import PackedTree, unpack_tree

_PIECE = 64 << 20
"""Bytes broadcast at a time: what a GPU must have to spare."""


class State:
    """Model, optimizer and the like, with the number of steps done.

    `commit` keeps a copy in memory of this node that outlives the process; `sync` at the start of every round brings
    all ranks to the newest copy that any node has. Planned ends commit by themselves at the round's last step. Every
    rank must hold the same state, as under DDP: the first worker of each node keeps it for all of them.

    Objects with `state_dict` and `load_state_dict` are kept by these, samplers with `set_epoch` by their epoch; all
    else is a plain value (number, text, list, dict, tensor), to be read and set as an attribute of the State.
    """

    step: int

    def __init__(self, *, step: int = 0, path: str | os.PathLike[str] | None = None, **parts: Any) -> None:
        """`path`: a file to save to when this node is told to go, loaded when no node has a copy in memory."""
        self.path = os.path.abspath(path) if path is not None else None  # noqa: PTH100
        self._objects = {name: part for name, part in parts.items() if _is_object(part)}
        self._values = ("step", *(name for name in parts if name not in self._objects))
        self.__dict__.update(parts, step=step)
        self._keeper = int(os.environ.get("LOCAL_RANK", "0")) == 0
        shared = progress_channel.node_memory()
        self._shared = shared or _own_memory()
        self._memory = self._shared if self._keeper else _own_memory()
        progress_channel.on_stop(self.commit)

    def commit(self) -> None:
        """Keep a copy of everything as it is now: a crash from here on loses only what came after."""
        if not self._keeper:
            return
        packed = PackedTree(self._tree())
        text = json.dumps({"path": self.path, "tree": packed.json}).encode()
        data = _data_after(len(text))
        memory = self._older()
        whole = BlockHeader(self.step, len(text), data + packed.size)
        view = state_block.begin_write(memory, whole.size)
        view[HEADER_SIZE : HEADER_SIZE + len(text)] = text
        packed.write(view, data)
        state_block.finish_write(memory, whole)

    def sync(self) -> None:
        """Bring every rank, also those that joined, to the newest state: of a node's memory, else of `path`.

        Call it once the process group exists, before the first step. Where nothing is found nothing changes.
        """
        index, kept = state_block.newest_block(self._shared)
        saved = state_block.read_file_header(self.path) if self.path else state_block.ABSENT
        offers = _gather([kept.step, kept.text, kept.size, saved.step, saved.text, saved.size])
        in_memory = max(offer[0] for offer in offers) >= 0
        column = 0 if in_memory else 3
        newest = max(offer[column] for offer in offers)
        if newest >= 0:
            source = next(rank for rank, offer in enumerate(offers) if offer[column] == newest)
            whole = BlockHeader(*offers[source][column : column + 3])
            if in_memory and all(offer[0] == newest for offer in offers):
                self._load(self._shared[index])
            elif _rank() == source:
                self._give(self._shared[index] if in_memory else None, whole, source)
            else:
                self._take(whole, source)
        progress_channel.progress(self.step)

    def save(self) -> None:
        """Commit, and write `path` now (rank 0): a checkpoint by hand."""
        if self.path is None:
            raise ValueError("State(path=...) says where to save")
        self.commit()
        if _rank() == 0:
            state_block.save_block(self._shared[state_block.newest_block(self._shared)[0]], self.path)

    # ---- between objects and trees -----------------------------------------------------------------------------------

    def _tree(self) -> dict[str, Any]:
        objects = {name: _state_of(part) for name, part in self._objects.items()}
        return {"objects": objects, "values": {name: getattr(self, name) for name in self._values}}

    def _load(self, descriptor: int) -> None:
        whole, text, view = state_block.read_block(descriptor)
        tree = unpack_tree(text["tree"], view, _data_after(whole.text))
        for name, part in self._objects.items():
            _restore(part, tree["objects"][name])
        self.__dict__.update({name: value for name, value in tree["values"].items() if name in self._values})

    def _older(self) -> int:
        """Where to write: the newest stays whole until there is a newer one."""
        index, _ = state_block.newest_block(self._memory)
        return self._memory[1 - index]

    # ---- between ranks -----------------------------------------------------------------------------------------------

    def _give(self, memory: int | None, whole: BlockHeader, source: int) -> None:
        descriptor = os.open(self.path or "", os.O_RDONLY) if memory is None else memory
        try:
            _, _, view = state_block.read_block(descriptor)
            for piece in _pieces(view, whole) if _distributed() else ():
                dist.broadcast(piece.to(_device()), source)
            self._load(descriptor)
        finally:
            if memory is None:
                os.close(descriptor)

    def _take(self, whole: BlockHeader, source: int) -> None:
        memory = self._older()
        view = state_block.begin_write(memory, whole.size)
        for piece in _pieces(view, whole):
            staged = piece if _device().type == "cpu" else torch.empty_like(piece, device=_device())
            dist.broadcast(staged, source)
            if staged is not piece:
                piece.copy_(staged)
        state_block.finish_write(memory, whole)
        self._load(memory)


def _own_memory() -> tuple[int, ...]:
    return tuple(os.memfd_create(f"elasticjob-state-{i}", os.MFD_CLOEXEC) for i in range(2))


def _data_after(text: int) -> int:
    """Where tensors begin after JSON of that length."""
    return -(-(HEADER_SIZE + text) // ALIGNMENT) * ALIGNMENT


def _pieces(view: Any, whole: BlockHeader) -> list[Any]:
    """All of a block but its first words, which say that it is whole, as tensors of bytes."""
    data = torch.frombuffer(view, dtype=torch.uint8)[HEADER_SIZE : whole.size]
    return list(data.split(_PIECE))


def _gather(words: list[int]) -> list[list[int]]:
    """The words of all ranks."""
    if not _distributed():
        return [words]
    mine = torch.tensor(words, dtype=torch.int64, device=_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [row.tolist() for row in found]


def _distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _rank() -> int:
    return int(dist.get_rank()) if _distributed() else 0


def _device() -> Any:
    """Where tensors must be for the default process group to move them."""
    cuda = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _is_object(part: Any) -> bool:
    return (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")) or hasattr(part, "set_epoch")


def _bare(part: Any) -> Any:
    """The module in its DDP wrapper: names without `module.`, loaded by wrapped and bare models alike."""
    return part.module if isinstance(part, torch.nn.parallel.DistributedDataParallel) else part


def _state_of(part: Any) -> Any:
    bare = _bare(part)
    return bare.state_dict() if hasattr(bare, "state_dict") else {"epoch": bare.epoch}


def _restore(part: Any, state: Any) -> None:
    bare = _bare(part)
    if hasattr(bare, "load_state_dict"):
        bare.load_state_dict(state)
    else:
        bare.set_epoch(state["epoch"])

"""Carry out the transfer of a state that `state_sources.choose_transfer` returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from elasticjob._runtime.contract.snapshot_format import state_block
from elasticjob._runtime.contract.snapshot_format.state_block import BlockHeader, data_start
from elasticjob._runtime.contract.snapshot_format.state_sources import Source, Transfer
from elasticjob.training import progress_channel
from elasticjob.training.devices import synchronize_device
from elasticjob.training.network_counters import busiest_interface, received_bytes
from elasticjob.training.replicated.live.live_block import LiveBlock, Receive
from elasticjob.training.snapshot_values.node_copies import NodeCopies
from elasticjob.training.snapshot_values.state_tree import unpack_tree
from elasticjob.training.state_exchange import PIECE, Exchange, pieces_of
from elasticjob.training.update_guard import guard

Loaded: TypeAlias = tuple[Any, Mapping[str, Any]]
"""The JSON of a block, and its tree with tensors."""


def transfer_state(
    transfer: Transfer,
    exchange: Exchange,
    copies: NodeCopies,
    *,
    is_live: bool,
    live_block: Callable[[], LiveBlock],
    copy_live: Callable[[], int],
    receive_live: Callable[[BlockHeader, Receive], Loaded] | None,
    path: str | None,
) -> Loaded | None:
    """Take part in the transfer, if there is one, and return what this rank has to load.

    `is_live`: the live objects of this rank have the state, and it loads nothing. `live_block` returns them as a block,
    `copy_live` copies them to memory and returns its descriptor.
    `receive_live` receives a block where it is loaded; None: into the memory of the pod. `path`: the State's file.
    """
    if transfer.sender is not None:
        exchange.pair_up(transfer.sender, transfer.pairs)
        if exchange.receives:
            return _receive(transfer, exchange, copies, receive_live, is_live=is_live)
        if exchange.sends and transfer.source is Source.FILE:
            with open(path or "", "rb") as file:
                _send(file.fileno(), exchange)
                return _read(file.fileno())
        if exchange.sends and transfer.copies_first:
            _send(copy_live(), exchange)
        elif exchange.sends and transfer.source is Source.LIVE:
            block = live_block()
            exchange.send(block.header, block.pieces(PIECE, exchange.device))
        elif exchange.sends:
            _send(copies.newest()[0], exchange)
    return None if is_live else _read(copies.newest()[0])


def _send(descriptor: int, exchange: Exchange) -> None:
    """Send the block in memory or in a file."""
    header, _, view = state_block.read_block(descriptor)
    exchange.send(header, pieces_of(view, header))


def _receive(
    transfer: Transfer,
    exchange: Exchange,
    copies: NodeCopies,
    receive_live: Callable[[BlockHeader, Receive], Loaded] | None,
    *,
    is_live: bool,
) -> Loaded | None:
    """Receive the block. A rank that does not load it, or whose pod has a copy, only takes part in the broadcast."""
    before = received_bytes()  # the other rank sends the block right after its header, which may come with it
    header, (descriptor, newest) = exchange.receive_header(), copies.newest()
    has_copy = newest.version == transfer.version
    if is_live or has_copy:
        exchange.discard(header)
        return None if is_live else _read(descriptor)
    with _reported(header.size, before):
        if receive_live is not None:
            return receive_live(header, partial(exchange.receive_pieces, header))

        def fill(view: Any) -> None:
            exchange.receive(view, header)
            guard.wait()  # what follows makes the block complete

        return _read(copies.write(header, fill))


@contextmanager
def _reported(size: int, before: Mapping[str, int]) -> Iterator[None]:
    """Report how long the block of this size takes, and over which interface it comes.

    `before`: the counters of the interfaces before any of it can have come.
    """
    begin = time.monotonic()
    yield
    synchronize_device()  # nccl has only queued the last piece
    seconds = time.monotonic() - begin
    progress_channel.report_received(size, seconds, busiest_interface(before, received_bytes(), size))


def _read(descriptor: int) -> Loaded:
    header, content, view = state_block.read_block(descriptor)
    return content, unpack_tree(content["tree"], view, data_start(header.json_size))

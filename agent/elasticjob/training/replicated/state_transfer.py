"""Carry out the transfer of a state that `state_sources.choose` returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticjob.training.blocks import state_block
from elasticjob.training.blocks.node_copies import NodeCopies
from elasticjob.training.blocks.state_sources import Source, Transfer
from elasticjob.training.state_exchange import Exchange, is_distributed, rank


@contextmanager
def transferred(
    transfer: Transfer,
    exchange: Exchange,
    copies: NodeCopies,
    *,
    is_live: bool,
    write_live: Callable[[], int],
    path: str | None,
) -> Iterator[int]:
    """Take part in the broadcast, if there is one, and yield the descriptor of the block that this rank may load.

    `is_live`: the live objects of this rank have the state, and it does not load the block. `write_live` copies them to
    memory and returns its descriptor. `path`: the file of the State.
    """
    if transfer.sender is None:
        yield copies.newest()[0]
    elif rank() != transfer.sender:
        yield _received(transfer, exchange, copies, is_live=is_live)
    elif transfer.source is Source.FILE:
        with open(path or "", "rb") as file:
            yield _sent(file.fileno(), transfer, exchange)
    else:
        yield _sent(write_live() if transfer.source is Source.LIVE else copies.newest()[0], transfer, exchange)


def _sent(descriptor: int, transfer: Transfer, exchange: Exchange) -> int:
    """Broadcast the block in memory or in a file to all ranks."""
    if is_distributed():
        header, _, view = state_block.read_block(descriptor)
        if transfer.source is Source.LIVE:
            exchange.send_header(header, rank())
        exchange.send(view, header, rank())
    return descriptor


def _received(transfer: Transfer, exchange: Exchange, copies: NodeCopies, *, is_live: bool) -> int:
    """Receive the block into memory, unless this rank does not load it and its node has a copy or another writer."""
    sender = transfer.sender or 0
    header = transfer.header
    if transfer.source is Source.LIVE:
        header = exchange.send_header(header, sender)
    descriptor, newest = copies.newest()
    if exchange.is_left_out():
        return descriptor
    if newest.version == transfer.version or (is_live and not copies.is_writer):
        exchange.discard(header, sender)
        return descriptor
    return copies.write(header, lambda view: exchange.receive(view, header, sender))

"""Simulate the ranks of one process group at its store: `python -m benchmarks.group_ranks BACKEND RANKS PORT`.

Each rank has a connection of its own and sends what torch's client sends while a process group forms, one request after
the other's answer. The requests over gloo were recorded with torch 2.15. Those over nccl follow its ProcessGroupNCCL:
beyond 128 ranks some ranks are roots, and every rank reads the id of each root. Where the limit of open files is below
the number of ranks, the last ones connect as others finish. The output is one JSON object.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticjob._runtime.store import wire
from elasticjob._runtime.store.open_files import RESERVED_FILES, raise_open_file_limit
from elasticjob._runtime.store.wire import Op

AT_ONCE = 256
"""Connections opened before the answers to their first requests are read."""
GLOO_KEY = b"/default_pg/0//cpu//0/%d"
GLOO_VALUE, GLOO_VALUE_PER_RANK = 154, 8
"""Bytes of the value that a rank sets: its address, and one number for each peer."""
NCCL_KEY = b"/default_pg/0//cuda//UniqueNCCLID:%d"
NCCL_VALUE = 128
"""Bytes of an id."""
RANKS_PER_ROOT = 128
"""Default of TORCH_NCCL_RANKS_PER_ROOT."""
_SIZE, _READY = 8, 1
"""Bytes of the length before a value, and of the answer to WAIT."""


@dataclass(frozen=True)
class Exchange:
    """A request and the number of bytes of its answer."""

    request: bytes
    answer: int


@dataclass(frozen=True)
class Pattern:
    """The requests of the ranks of one group."""

    common: Sequence[Exchange]
    """What each rank sends, in order."""
    own: Sequence[bytes]
    """What rank r sends before that, without an answer; nothing if r has no item."""


CONNECT = Exchange(wire.request(Op.VALIDATE, number=wire.MAGIC) + wire.request(Op.PING, number=1), 4)
JOIN = Exchange(wire.request(Op.ADD, [b"init/"], number=1), 8)


def gloo(ranks: int) -> Pattern:
    """Return the pattern of gloo: every rank reads what every rank has set."""
    size = GLOO_VALUE + GLOO_VALUE_PER_RANK * ranks
    keys = [GLOO_KEY % rank for rank in range(ranks)]
    common = []
    for key in keys:
        wait = Exchange(wire.request(Op.WAIT, [key]), _READY)
        common += [wait, wait, Exchange(wire.request(Op.GET, [key]), _SIZE + size)]
    return Pattern(common, [wire.request(Op.SET, [key], [bytes(size)]) for key in keys])


def nccl(ranks: int) -> Pattern:
    """Return the pattern of nccl: one id, or with more ranks than RANKS_PER_ROOT the ids of several roots."""
    roots = -(-ranks // RANKS_PER_ROOT)
    keys = [NCCL_KEY % root for root in range(roots)]
    read = wire.request(Op.MULTI_GET, keys) if roots > 1 else wire.request(Op.GET, keys)
    common = [Exchange(wire.request(Op.WAIT, keys), _READY), Exchange(read, roots * (_SIZE + NCCL_VALUE))]
    return Pattern(common, [wire.request(Op.SET, [key], [bytes(NCCL_VALUE)]) for key in keys])


class GroupRanks:
    """The simulated ranks of one process group."""

    def __init__(self, pattern: Pattern, port: int) -> None:
        self._pattern = pattern
        self._port = port
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._ranks: dict[int, int] = {}
        """Rank by descriptor."""

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect the ranks."""
        waiting = []
        for rank in ranks:
            waiting.append(self._open(rank))
            if len(waiting) == AT_ONCE:
                _read_connected(waiting)
                waiting = []
        _read_connected(waiting)

    def _open(self, rank: int) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self._port))
        self._sockets[peer.fileno()], self._ranks[peer.fileno()] = peer, rank
        peer.sendall(CONNECT.request)
        return peer

    def form(self, late: Sequence[int]) -> None:
        """Send everything that follows, and read all answers. `late`: ranks that connect as others have finished."""
        pattern, poll, sockets = self._pattern, self._poll, self._sockets
        exchanges = [JOIN, *pattern.common]
        position: dict[int, int] = {}
        left: dict[int, int] = {}
        waiting = list(late)

        def join(peer: socket.socket) -> None:
            poll.register(peer.fileno(), select.EPOLLIN)
            position[peer.fileno()], left[peer.fileno()] = 0, JOIN.answer
            peer.sendall(JOIN.request)

        for peer in sockets.values():
            join(peer)
        while sockets:
            for descriptor, _ in poll.poll():
                peer = sockets[descriptor]
                left[descriptor] -= len(_receive(peer))
                if left[descriptor] > 0:
                    continue
                at = position[descriptor] = position[descriptor] + 1
                if at == len(exchanges):
                    poll.unregister(descriptor)
                    sockets.pop(descriptor).close()
                    if waiting:
                        new = self._open(waiting.pop())
                        _read_connected([new])
                        join(new)
                    continue
                exchange, rank = exchanges[at], self._ranks[descriptor]
                own = pattern.own[rank] if at == 1 and rank < len(pattern.own) else b""
                left[descriptor] = exchange.answer
                peer.sendall(own + exchange.request)


def _read_connected(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        if len(peer.recv(CONNECT.answer, socket.MSG_WAITALL)) < CONNECT.answer:
            raise ConnectionError("the store closed a connection")


def _receive(peer: socket.socket) -> bytes:
    data = peer.recv(1 << 20)
    if not data:
        raise ConnectionError("the store closed a connection")
    return data


def main() -> None:
    backend, ranks, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # A store at its own limit refuses a rank that connects before it has seen that others closed: leave it room.
    most = raise_open_file_limit()[1] - 8 * RESERVED_FILES
    group = GroupRanks({"gloo": gloo, "nccl": nccl}[backend](ranks), port)
    began = time.monotonic()
    group.connect(range(min(ranks, most)))
    connected = time.monotonic()
    group.form(range(most, ranks))
    print(json.dumps({"connect": connected - began, "elapsed": time.monotonic() - began}))


if __name__ == "__main__":
    main()

"""Run torch's dynamic rendezvous with N nodes: `python -m benchmarks.stock_crowd N rendezvous|again`.

Each node is a thread with its own connection to one C++ store in this process. The output is one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

_LOCK = threading.Lock()


class Counting(C10dRendezvousBackend):  # type: ignore[misc]
    """A backend that counts the store operations and the bytes of the state that they transfer."""

    operations = 0
    transferred = 0
    """Bytes."""

    def get_state(self) -> Any:
        found = super().get_state()
        self._count(len(found[0]) if found else 0)
        return found

    def set_state(self, state: bytes, token: Any = None) -> Any:
        done = super().set_state(state, token)
        self._count(2 * len(state))
        return done

    def _count(self, size: int) -> None:
        with _LOCK:
            Counting.operations += 1
            Counting.transferred += size * 4 // 3  # base64


def main() -> None:
    count, figure = int(sys.argv[1]), sys.argv[2]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    handlers = [_handler(port, count) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        figures = {"rendezvous": _timed(pool, handlers)}
        figures |= {"operations per node": Counting.operations / count, "bytes per node": Counting.transferred / count}
        if figure == "again":
            Counting.operations = Counting.transferred = 0
            figures["again"] = _timed(pool, handlers)
            figures |= {
                "operations per node, again": Counting.operations / count,
                "bytes per node, again": Counting.transferred / count,
            }
    print(json.dumps(figures), flush=True)
    del server
    os._exit(0)  # the handlers' heartbeat threads would delay the exit


def _handler(port: int, count: int) -> Any:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    backend = Counting(store, "bench")
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "bench", count, count, local_addr="127.0.0.1")
    return create_handler(store, backend, parameters)


def _timed(pool: ThreadPoolExecutor, handlers: list[Any]) -> float:
    """Let all nodes join and return the seconds until the last node has its rank."""
    began = time.monotonic()
    calls: list[Callable[[], Any]] = [handler.next_rendezvous for handler in handlers]
    for future in [pool.submit(call) for call in calls]:
        future.result()
    return time.monotonic() - began


if __name__ == "__main__":
    main()

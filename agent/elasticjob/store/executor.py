"""What one client of a store is answered: requests in, bytes out, in their order. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from elasticjob.store.storage import Storage, Waiter
from elasticjob.store.wire import Op, Request, WireError, i64, sized, u32

_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


class RequestExecutor:
    """Collects the answers to one client until they are taken. `wake` says that a wait of this client has ended."""

    def __init__(self, store: Storage, limit: int, wake: Callable[[], None]) -> None:
        self._store = store
        self._limit = limit
        """Bytes in one answer."""
        self._wake = wake
        self._waiter: Waiter | None = None
        self._collected: list[bytes] = []
        self.size = 0
        """Bytes collected."""

    def take(self) -> bytes:
        """All that was collected since the last time."""
        collected = b"".join(self._collected)
        self._collected.clear()
        self.size = 0
        return collected

    def execute(self, request: Request) -> None:
        """Carry a request out and collect the answer, if it has one. WireError: close the connection."""
        op, store, write = request.op, self._store, self._write
        match op:
            case Op.SET:
                store.set(request.keys[0], request.values[0])
            case Op.GET:
                write(sized(store.get(request.keys[0])))
            case Op.ADD:
                write(i64(store.add(request.keys[0], request.number)))
            case Op.CHECK:
                write(_READY if store.check(request.keys) else _NOT_READY)
            case Op.WAIT:
                self.cancel_wait()
                self._wait(store.wait(request.keys, self._stop_waiting))
            case Op.COMPARE_SET:
                write(sized(store.compare_set(request.keys[0], *request.values)))
            case Op.APPEND:
                store.append(request.keys[0], request.values[0])
            case Op.MULTI_GET:
                self._write_all([store.get(key) for key in request.keys])
            case Op.MULTI_SET:
                for key, value in zip(request.keys, request.values, strict=True):
                    store.set(key, value)
            case _:
                self._to_rare(request)

    def _to_rare(self, request: Request) -> None:
        store, write = self._store, self._write
        match request.op:
            case Op.GETNUMKEYS:
                write(i64(len(store)))
            case Op.DELETE:
                write(i64(store.delete(request.keys[0])))
            case Op.CANCEL_WAIT:
                self.cancel_wait()
                write(_WAIT_CANCELED)
            case Op.PING:
                write(u32(request.number))
            case Op.QUEUE_PUSH:
                store.push(request.keys[0], request.values[0])
            case Op.QUEUE_POP:
                length, value = store.pop(request.keys[0])
                write(i64(length) + (sized(value) if length else b""))
            case Op.QUEUE_LEN:
                write(i64(store.length(request.keys[0])))
            case Op.LIST_KEYS:
                self._write_all(list(store.keys()), i64(len(store)))
            case Op.BARRIER:
                self.cancel_wait()
                self._wait(store.barrier(request.keys[0], request.number, self._stop_waiting))
            case _:
                raise WireError("out-of-place", f"{request.op.name} has no place here")

    def cancel_wait(self) -> None:
        """This client waits no more."""
        if self._waiter is not None:
            self._store.cancel(self._waiter)
            self._waiter = None

    def _wait(self, waiter: Waiter | None) -> None:
        self._waiter = waiter
        if waiter is None:
            self._write(_STOP_WAITING)

    def _stop_waiting(self) -> None:
        self._waiter = None
        self._write(_STOP_WAITING)
        self._wake()

    def _write(self, data: bytes) -> None:
        self.size += len(data)
        self._collected.append(data)

    def _write_all(self, items: list[bytes], head: bytes = b"") -> None:
        size = sum(map(len, items)) + 8 * len(items)
        if size > self._limit:
            raise WireError("answer-too-long", f"asks for {size} bytes at once; {self._limit} are allowed")
        self._write(head + b"".join(map(sized, items)))

"""Execute the requests of one client on the store's data, and collect the answers in order. No I/O.

Every request is executed and answered at once, with one exception. A WAIT or BARRIER whose condition does not hold yet
becomes a pending `Waiter` of the `Storage`, and is answered when a later request, usually another client's, makes the
condition true. A client has one pending wait at most: CANCEL_WAIT ends it with an answer of its own, a further WAIT or
BARRIER replaces it without one. torch's clients send nothing but CANCEL_WAIT during a wait; other requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticjob._runtime.store.storage import Storage, Value, Waiter
from elasticjob._runtime.store.wire import U64, Op, Request, WireError, i64, sized, u32

_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


class RequestExecutor:
    """Executes one client's requests and collects the answers until `take`.

    `on_wait_ended` is called when the answer to a pending WAIT or BARRIER has been collected, usually during another
    client's request. The callee must then send the answers.
    """

    def __init__(self, store: Storage, limit: int, on_wait_ended: Callable[[], None]) -> None:
        """`limit`: most bytes in one answer."""
        self._store = store
        self._limit = limit
        self._on_wait_ended = on_wait_ended
        self._waiter: Waiter | None = None
        """The pending WAIT or BARRIER; None if there is none."""
        self._answers: list[bytes] = []
        self.size = 0
        """Bytes in the collected answers."""

    def take(self) -> bytes:
        """Return the answers collected since the last call."""
        answers = b"".join(self._answers)
        self._answers.clear()
        self.size = 0
        return answers

    def execute(self, request: Request) -> None:
        """Execute a request and collect its answer, if it has one. WireError: the connection must be closed."""
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
                self._execute_rare(request)

    def _execute_rare(self, request: Request) -> None:
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
                raise WireError("out-of-place", f"{request.op.name} is only allowed as the first request")

    def cancel_wait(self) -> None:
        """Cancel the pending WAIT or BARRIER, without an answer."""
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
        self._on_wait_ended()

    def _write(self, data: bytes) -> None:
        self.size += len(data)
        self._answers.append(data)

    def _write_all(self, items: Sequence[Value], head: bytes = b"") -> None:
        size = sum(map(len, items)) + 8 * len(items)
        if size > self._limit:
            raise WireError(
                "answer-too-long", f"the answer to one request has {size} bytes; {self._limit} bytes are allowed"
            )
        parts: list[Value] = [head]
        for item in items:
            parts += (U64.pack(len(item)), item)
        self._write(b"".join(parts))

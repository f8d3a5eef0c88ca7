"""Workers' output: each line gets a prefix, as with torchrun's `tee`; the last lines are kept for failure reports.

A slow reader of the agent's output blocks the workers, whose pipes fill, but never the agent.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable

CHUNK = 1 << 16
MAX_LINE = 1 << 20
"""Bytes; longer lines are split."""
MAX_PENDING = 4 << 20
"""Bytes that wait to be written; while there are more, no worker's pipe is read."""
FILE_TIMEOUT = 1.0
"""Seconds that a slow disk may delay the close of a worker's log file."""
TAIL_LINES = 20
"""Last lines kept of each stream."""
TAIL_WIDTH = 400
"""Characters kept of each line."""

_EXCEPTION = re.compile(rb"([A-Za-z_][\w.]*)(?:: (.*))?$")
TORCHRUN_FAILED = "ChildFailedError"
"""torchrun's exception, printed after its worker's; it does not name the cause."""
_TRACEBACK = b"Traceback (most recent call last):"
_RANK = re.compile(rb"\[rank\d+\]: ?")
"""torch's prefix for each line of an uncaught exception, once a process group exists."""


class OutputSink:
    """One output of the agent (stdout or stderr). A thread writes: a slow reader cannot block the event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pending = 0
        self._waiting: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"output-{descriptor}")
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Queue data to be written. Never blocks; callers check `full` before they read more."""
        self._pending += len(data)
        self._queue.put(data)

    @property
    def full(self) -> bool:
        return self._pending > MAX_PENDING

    def call_when_free(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when at most half of MAX_PENDING is left to write."""
        self._waiting.append(resume)

    def close(self, timeout: float) -> None:
        """Write the pending data, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            size = len(data)
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                pass  # the reader has closed; the workers must not fail because of it
            try:
                self._loop.call_soon_threadsafe(self._written, size)
            except RuntimeError:
                return  # the event loop is closed: the agent exits

    def _written(self, size: int) -> None:
        self._pending -= size
        if self._pending <= MAX_PENDING // 2 and self._waiting:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()


class FileSink(OutputSink):
    """A log file; it is closed once all data is written."""

    def _write(self) -> None:
        super()._write()
        os.close(self._descriptor)


class Tail:
    """The last lines of one stream of a worker, and the exception that its last traceback ended with."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.exception: tuple[str, str] | None = None
        """(type name without its module, text)."""
        self._in_traceback = False

    def feed(self, line: bytes) -> None:
        """Take the next line, without its newline."""
        if match := _RANK.match(line):
            line = line[match.end() :]
        self.lines.append(line[: 4 * TAIL_WIDTH].decode(errors="replace")[:TAIL_WIDTH])
        if line.endswith(_TRACEBACK):
            self._in_traceback = True
        elif self._in_traceback and line and not line.startswith((b" ", b"\t")):
            self._in_traceback = False
            if match := _EXCEPTION.match(line):
                name, text = match.group(1).decode(), (match.group(2) or b"").decode(errors="replace")
                name = name.rsplit(".", 1)[-1]
                if name != TORCHRUN_FAILED:
                    self.exception = (name, text)


class WorkerPipe:
    """The reading end of a worker's stdout or stderr."""

    def __init__(
        self,
        descriptor: int,
        prefix: str,
        sink: OutputSink | None,
        tail: Tail | None = None,
        file: FileSink | None = None,
    ) -> None:
        """`sink` gets lines with the prefix, `file` the bytes unchanged, `tail` the last lines."""
        self._descriptor = descriptor
        self._prefix = prefix.encode()
        self._sink = sink
        self._file = file
        self._tail = tail
        self._partial = b""
        self._open = True
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._readable)

    def drain(self) -> None:
        """Read all that is in the pipe now. The worker has ended; its descendants may keep the pipe open."""
        while self._open and self._read():
            pass

    def close(self) -> None:
        """Read all that is in the pipe, end the last line, and close the pipe."""
        self.drain()
        self._end()

    def _readable(self) -> None:
        full = next((sink for sink in (self._sink, self._file) if sink is not None and sink.full), None)
        if full is not None:
            self._loop.remove_reader(self._descriptor)
            full.call_when_free(self._resume)
        else:
            self._read()

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end()
            return False
        self._take(data)
        return True

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._partial:
            self._take_lines(b"\n")
        if self._file is not None:
            self._file.close(FILE_TIMEOUT)

    def _take(self, data: bytes) -> None:
        if self._file is not None:
            self._file.put(data)
        self._take_lines(data)

    def _take_lines(self, data: bytes) -> None:
        whole, newline, self._partial = (self._partial + data).rpartition(b"\n")
        if not newline and len(self._partial) > MAX_LINE:
            whole, self._partial = self._partial, b""
        if not (whole or newline):
            return
        lines = whole.split(b"\n")
        if self._tail is not None:
            for line in lines[-4 * TAIL_LINES :]:
                self._tail.feed(line)
        if self._sink is not None:
            self._sink.put(b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))

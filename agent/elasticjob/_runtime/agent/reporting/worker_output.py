"""Workers' output: each line gets a prefix, as with torchrun's `tee`; the last lines are kept for failure reports.

A slow reader of the agent's output blocks the workers, whose pipes fill, but never the agent.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import re
import termios
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elasticjob._runtime.diagnosis import place_of

log = logging.getLogger(__name__)

CHUNK = 1 << 16
MAX_LINE = 1 << 20
"""Bytes; longer lines are split."""
MAX_PENDING = 4 << 20
"""Bytes that may wait to be written. While more are waiting, no worker's pipe is read."""
FILE_TIMEOUT = 1.0
"""Seconds that slow storage of the workers' log files may delay the agent's exit."""
_NO_FILE = -1
"""Descriptor of a log file that is not open: what is written to it is dropped."""
TAIL_LINES = 20
"""Last lines kept of each stream."""
TAIL_WIDTH = 400
"""Characters kept of each line."""

_LINE_ENDS = re.compile(rb"(\r\n|\r|\n)")
_EXCEPTION = re.compile(r"([^\W\d][\w.]*(?:<locals>[\w.]+)*)(?:: (.*))?$")
"""The line with an exception's qualified name and text."""
_GROUP_INDENT = b"  | "
"""Prefix of the lines of a traceback if the exception is a group."""
_OF_GROUP_MEMBER = re.compile(rb" +\| ")
"""Start of the lines in the traceback of an exception that is a member of a group."""
_SYNTAX_ERRORS = (b"SyntaxError: ", b"IndentationError: ", b"TabError: ")
"""Errors in the script itself; Python prints their place without a traceback."""
_FILE = b'  File "'
_FRAME = re.compile(rb'  (?:\| )?(?:  )?File "')
"""Start of the line of a frame, also in the traceback of a group."""
_IGNORED = b"Exception ignored "
"""Start of the line before the traceback of an exception that does not end the program (`__del__`, atexit)."""
TORCHRUN_FAILED = "ChildFailedError"
"""torchrun's own exception, which it prints after the worker's. It does not name the cause."""
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

    def finish(self) -> None:
        """Take no more data. The pending data is still written; this does not wait for it."""
        self._queue.put(None)

    def close(self, timeout: float) -> None:
        """Write the pending data, for at most `timeout` seconds."""
        self.finish()
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


class DescriptorSink(OutputSink):
    """An output of a launcher, such as a pipe to `tee`. It closes the descriptor once all is written."""

    def _write(self) -> None:
        super()._write()
        os.close(self._descriptor)


class FileSink(OutputSink):
    """A log file. Its thread creates the folder, and opens, writes and closes the file: the storage may be slow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(_NO_FILE)

    @property
    def writing(self) -> bool:
        """Whether the file is not closed yet."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait until the file is closed, for at most `timeout` seconds."""
        self._thread.join(timeout)

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            text = f"worker output is not written to a log file: {error}"
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(log.warning, "%s", text)
        super()._write()
        if self._descriptor != _NO_FILE:
            with suppress(OSError):  # a network file system reports a failed write here
                os.close(self._descriptor)


def wait_for_files(files: Iterable[FileSink], timeout: float) -> None:
    """Wait until the files are closed, for at most `timeout` seconds in total. `finish` of each was called before."""
    deadline = time.monotonic() + timeout
    for file in files:
        file.join(max(0.0, deadline - time.monotonic()))


def file_identity(descriptor: int) -> tuple[int, int]:
    """Return device and inode of an open file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class OutputLine(NamedTuple):
    """A line of output, without its end."""

    text: bytes
    replaces: bool = False
    """Whether it replaces the line before on a terminal, as the lines of a progress bar do."""


class LineSplitter:
    r"""Splits output into lines as a terminal shows them. `\r` ends a line; the next one replaces it.

    A line that replaces another is returned as soon as it is read, because the `\r` after it may come much later.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._after_return = False
        """Whether `_partial` follows a carriage return."""
        self._row_shown = False
        """Whether a line of the terminal's current row was returned."""

    def feed(self, data: bytes) -> list[OutputLine]:
        """Return the lines that end in `data`, and the beginning of a line if it is to be shown at once."""
        lines = self._split_at_returns(data) if self._after_return or b"\r" in data else self._split(data)
        if len(self._partial) > MAX_LINE or (self._after_return and self._partial):
            lines.append(self._line(self._partial))
            self._partial = b""
        return lines

    def end(self) -> list[OutputLine]:
        """Return the line that has no end."""
        return self.feed(b"\n") if self._partial else []

    def _split(self, data: bytes) -> list[OutputLine]:
        whole, newline, self._partial = (self._partial + data).rpartition(b"\n")
        self._row_shown = self._row_shown and not newline
        return [OutputLine(line) for line in whole.split(b"\n")] if newline else []

    def _split_at_returns(self, data: bytes) -> list[OutputLine]:
        *parts, self._partial = _LINE_ENDS.split(self._partial + data)
        lines = []
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            if text or (end != b"\r" and not self._after_return):
                lines.append(self._line(text))
            self._after_return = end == b"\r"
            self._row_shown = self._row_shown and self._after_return
        return lines

    def _line(self, text: bytes) -> OutputLine:
        line = OutputLine(text, self._row_shown and self._after_return)
        self._row_shown = True
        return line


class Tail:
    """The last lines of one stream of a worker, and the exception that its last traceback ended with."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.exception: tuple[str, str] | None = None
        """(type name without its module, text)."""
        self.place = ""
        """Where the user's code raised it, as in `innermost_place`; empty if unknown."""
        self._place = ""
        """The same of the traceback that is not complete yet."""
        self._in_traceback = False
        self._in_syntax_error = False
        self._before = b""
        """The line before."""

    def feed_all(self, lines: Sequence[OutputLine]) -> None:
        """Take the next lines. Lines that are neither among the last ones nor part of a traceback are skipped."""
        first = 0 if self._in_traceback else self._first_needed(lines)
        for line in lines[first:]:
            self.feed(line.text, replaces=line.replaces)

    def _first_needed(self, lines: Sequence[OutputLine]) -> int:
        end = max(0, len(lines) - 4 * TAIL_LINES)
        # A traceback of 27 frames has more lines than that: three for each frame (Python 3.11).
        headers = (i for i in range(end) if lines[i].text.endswith(_TRACEBACK))
        return max(0, next(headers, end + 1) - 1)  # the line before the header tells whether the exception is ignored

    def feed(self, line: bytes, *, replaces: bool = False) -> None:
        """Take the next line, without its newline. `replaces`: see `OutputLine`."""
        if match := _RANK.match(line):
            line = line[match.end() :]
        if replaces and self.lines:
            self.lines.pop()
        self.lines.append(line[: 4 * TAIL_WIDTH].decode(errors="replace")[:TAIL_WIDTH])
        self._find_exception(line)
        self._before = line

    def _find_exception(self, line: bytes) -> None:
        if line.endswith(_TRACEBACK) and not _OF_GROUP_MEMBER.match(line):
            self._in_traceback = not self._before.startswith(_IGNORED)
            self._place = ""
        elif self._in_traceback and (text := _unindented(line)):
            self._in_traceback = False
            self._record(text)
        elif self._in_traceback and _FRAME.match(line):
            self._place = place_of(line.decode(errors="replace")) or self._place
        elif line.startswith(_FILE) and not self._in_traceback:
            self._in_syntax_error = True
            self._place = place_of(line.decode(errors="replace"))
        elif self._in_syntax_error and (text := _unindented(line)):
            self._in_syntax_error = False
            if text.startswith(_SYNTAX_ERRORS):
                self._record(text)

    def _record(self, line: bytes) -> None:
        if match := _EXCEPTION.match(line.decode(errors="replace")):
            name, text = match[1].rsplit(".", 1)[-1], match[2] or ""
            if name != TORCHRUN_FAILED:
                self.exception, self.place = (name, text), self._place


def _unindented(line: bytes) -> bytes:
    """Return a line that begins in the first column of a traceback; b"" for other lines.

    The traceback of a group of exceptions is indented.
    """
    text = line.removeprefix(_GROUP_INDENT)
    return b"" if text.startswith((b" ", b"\t")) else text


class WorkerPipe:
    """The reading end of a worker's stdout or stderr."""

    def __init__(
        self,
        descriptor: int,
        prefix: str,
        sink: OutputSink | None,
        tail: Tail | None = None,
        file: FileSink | None = None,
        watch: Callable[[Sequence[OutputLine]], None] | None = None,
    ) -> None:
        """`sink` gets lines with the prefix, `file` the bytes unchanged, `tail` the last lines, `watch` all lines."""
        self._descriptor = descriptor
        self._prefix = prefix.encode()
        self._sink = sink
        self._file = file
        self._tail = tail
        self._watch = watch
        self._lines = LineSplitter()
        self._open = True
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._readable)

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the pipe, which its other end has too; None once it is closed."""
        return file_identity(self._descriptor) if self._open else None

    def begin_round(self, prefix: str, tail: Tail, watch: Callable[[Sequence[OutputLine]], None]) -> None:
        """Use another prefix, tail and watch for what the same process writes from now on."""
        self.drain()
        self._prefix, self._tail, self._watch = prefix.encode(), tail, watch

    def drain(self) -> None:
        """Read all that is in the pipe now, but not what is added later.

        The worker has ended, but its descendants may keep the pipe open and write faster than this reads.
        """
        left = self._waiting()
        while self._open and left > 0 and (size := self._read()):
            left -= size
        if self._open:
            self._read()  # the end of the pipe, if no process has it open any more

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

    def _waiting(self) -> int:
        """Return how many bytes are in the pipe."""
        if not self._open:
            return 0
        size = array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, size)
        return size[0]

    def _read(self) -> int:
        """Read what is there, up to CHUNK bytes; return how many. At the end of the pipe, close it."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._end()
            return 0
        self._take(data)
        return len(data)

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._take_lines(self._lines.end())
        if self._file is not None:
            self._file.finish()

    def _take(self, data: bytes) -> None:
        if self._file is not None:
            self._file.put(data)
        self._take_lines(self._lines.feed(data))

    def _take_lines(self, lines: list[OutputLine]) -> None:
        if self._tail is not None:
            self._tail.feed_all(lines)
        if self._watch is not None and lines:
            self._watch(lines)
        if self._sink is not None and lines:
            self._sink.put(b"".join(b"%s%s\n" % (self._prefix, line.text) for line in lines))

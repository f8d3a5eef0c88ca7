"""Workers' output: prefixes, long lines, slow readers, and the exception in the last lines."""

from __future__ import annotations

import asyncio
import os

import pytest

from elasticjob.agent.reporting.worker_output import MAX_LINE, MAX_PENDING, OutputSink, Tail, WorkerPipe

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*TRACEBACK, "ValueError: bad batch"], ("ValueError", "bad batch")),
        ([*TRACEBACK, "pkg.errors.Bad: no"], ("Bad", "no")),
        ([*TRACEBACK, "KeyboardInterrupt"], ("KeyboardInterrupt", "")),
        ([*TRACEBACK, "KeyError: 1", "", "During ...:", "", *TRACEBACK, "OSError: x", "later"], ("OSError", "x")),
        (["ValueError: printed without a traceback"], None),
        ([f"[rank3]: {line}" for line in (*TRACEBACK, "ValueError: bad")], ("ValueError", "bad")),
        ([*TRACEBACK, "OSError: x", *TRACEBACK, "torch.errors.ChildFailedError: ", "===="], ("OSError", "x")),
    ],
)
def test_the_last_exception_of_standard_error(lines: list[str], expected: tuple[str, str] | None) -> None:
    tail = Tail()
    for line in lines:
        tail.feed(line.encode())
    assert tail.exception == expected


async def test_output_is_prefixed_line_by_line_and_long_lines_are_cut() -> None:
    (out, into), (read, write) = os.pipe(), os.pipe()
    tail = Tail()
    sink = OutputSink(write)
    stream = WorkerPipe(out, "[default3]:", sink, tail)
    reader = asyncio.get_running_loop().run_in_executor(None, _read_all, read)
    await asyncio.to_thread(_write_all, into, b"one\ntwo\n" + b"x" * (MAX_LINE + 10) + b"\nlast")
    stream.close()
    sink.close(10)
    os.close(write)
    lines = (await reader).split(b"\n")
    assert lines[:2] == [b"[default3]:one", b"[default3]:two"]
    assert lines[-2:] == [b"[default3]:last", b""]
    assert all(line.startswith(b"[default3]:") for line in lines[:-1])
    assert sum(len(line) - len(b"[default3]:") for line in lines[2:-2]) == MAX_LINE + 10
    assert tail.lines[-1] == "last"


async def test_a_slow_reader_blocks_the_worker_and_not_the_event_loop() -> None:
    (out, into), (read, write) = os.pipe(), os.pipe()
    os.set_blocking(into, False)
    sink = OutputSink(write)
    stream = WorkerPipe(out, "", sink)
    sent, stuck = 0, 0
    while stuck < 100:  # no reader: the pipes and the pending bytes fill
        try:
            sent += os.write(into, b"line\n" * 1000)
            stuck = 0
        except BlockingIOError:
            stuck += 1
        await asyncio.sleep(0)
    assert sent < 2 * MAX_PENDING
    reader = asyncio.get_running_loop().run_in_executor(None, _read_all, read)
    os.set_blocking(into, True)
    await asyncio.to_thread(_write_all, into, b"end\n")
    stream.close()
    await asyncio.to_thread(sink.close, 10)
    os.close(write)
    assert len(await reader) == sent + 4


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()

"""Workers' output: prefixes, long lines, slow readers, and the exception in the last lines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from elasticjob._runtime.agent.reporting.worker_output import (
    MAX_LINE,
    MAX_PENDING,
    FileSink,
    LineSplitter,
    OutputSink,
    Tail,
    WorkerPipe,
    wait_for_files,
)

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()"]

GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in <module>
  |     raise g
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 1, in <module>
    | TypeError: 2
    +------------------------------------
""".splitlines()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*TRACEBACK, "ValueError: bad batch"], ("ValueError", "bad batch")),
        ([*TRACEBACK, "pkg.errors.Bad: no"], ("Bad", "no")),
        ([*TRACEBACK, "KeyboardInterrupt"], ("KeyboardInterrupt", "")),
        ([*TRACEBACK, "KeyError: 1", "", "During ...:", "", *TRACEBACK, "OSError: x", "later"], ("OSError", "x")),
        (["ValueError: printed without a traceback"], None),
        ([f"[rank3]: {line}" for line in (*TRACEBACK, "ValueError: bad")], ("ValueError", "bad")),
        ([*TRACEBACK, "__main__.f.<locals>.Bad: no"], ("Bad", "no")),
        ([*TRACEBACK, "Größe: no"], ("Größe", "no")),
        (['  File "x.py", line 1', "    def f(:", "          ^", "SyntaxError: bad"], ("SyntaxError", "bad")),
        (['  File "x.py", line 1', "printed", "ValueError: printed"], None),
        ([*TRACEBACK, "OSError: x", "Exception ignored in: <f>", *TRACEBACK, "ValueError: y"], ("OSError", "x")),
        ([*GROUP, "printed"], ("ExceptionGroup", "two (2 sub-exceptions)")),
        ([*TRACEBACK, "OSError: x", *TRACEBACK, "torch.errors.ChildFailedError: ", "===="], ("OSError", "x")),
    ],
)
def test_the_last_exception_of_standard_error(lines: list[str], expected: tuple[str, str] | None) -> None:
    tail = Tail()
    for line in lines:
        tail.feed(line.encode())
    assert tail.exception == expected


def deep_traceback(frames: int) -> list[str]:
    frame = ['  File "/app/model.py", line {}, in f', "    return g()", "           ^^^"]
    return [TRACEBACK[0], *(line.format(i) for i in range(frames) for line in frame), "ValueError: deep"]


@pytest.mark.parametrize("frames", [26, 27, 300])
async def test_a_long_traceback_in_one_read_names_its_exception(frames: int) -> None:
    lines = ["log"] * 200 + deep_traceback(frames) + ["bye"] * 100
    tail, (read, write) = Tail(), os.pipe()
    os.set_blocking(write, False)
    os.write(write, "\n".join([*lines, ""]).encode())
    os.close(write)
    pipe = WorkerPipe(read, "", None, tail)
    pipe.close()
    assert tail.exception == ("ValueError", "deep")
    assert tail.place == f"model.py, line {frames - 1}"
    assert list(tail.lines) == ["bye"] * 20


async def test_a_long_traceback_in_several_reads_names_its_exception_unless_it_is_ignored() -> None:
    for before, expected in ((["log"], ("ValueError", "deep")), (["Exception ignored in: <f>"], None)):
        tail, (read, write) = Tail(), os.pipe()
        pipe = WorkerPipe(read, "", None, tail)
        lines = [*before, *deep_traceback(300)]
        for part in (lines[:5], lines[5:400], lines[400:]):
            os.write(write, "\n".join([*part, ""]).encode())
            pipe.drain()
        os.close(write)
        pipe.close()
        assert tail.exception == expected


DEEPER = ['  File "/app/model.py", line 12, in forward', '  File "/usr/lib/python3.11/json/__init__.py", line 9, in f']


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ([*TRACEBACK, "ValueError: bad"], "x.py, line 1"),
        ([*TRACEBACK, *DEEPER, "ValueError: bad"], "model.py, line 12"),
        (
            [*TRACEBACK, *DEEPER, "ValueError: bad", "Exception ignored in: <f>", *TRACEBACK, "OSError: y"],
            "model.py, line 12",
        ),
        ([*TRACEBACK, *DEEPER, "KeyError: 1", "", "During ...:", "", *TRACEBACK, "OSError: x"], "x.py, line 1"),
        (['  File "x.py", line 7', "    def f(:", "          ^", "SyntaxError: bad"], "x.py, line 7"),
        (GROUP, "x.py, line 1"),
        (["ValueError: printed without a traceback"], ""),
    ],
)
def test_the_place_of_the_last_exception(lines: list[str], place: str) -> None:
    tail = Tail()
    for line in lines:
        tail.feed(line.encode())
    assert tail.place == place


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["a\nb", "c\n\nd\n"], [["a"], ["bc", "", "d"]]),
        (["\r 1%", "\r 2%", "\r 3%\n", "end\n"], [[" 1%"], [" 2%"], [" 3%"], ["end"]]),
        (["\r 1%", "\n", "\n", "end\n"], [[" 1%"], [], [""], ["end"]]),
        (["\r 1%", "Traceback\n", "x\n"], [[" 1%"], ["Traceback"], ["x"]]),
        (["a\r\nb\r", "\nc\n"], [["a", "b"], ["c"]]),
        (["a\n\r 1%\r 2%\r"], [["a", " 1%", " 2%"]]),
    ],
)
def test_lines_that_replace_each_other_are_shown_at_once(chunks: list[str], expected: list[list[str]]) -> None:
    splitter = LineSplitter()
    assert [[line.text.decode() for line in splitter.feed(chunk.encode())] for chunk in chunks] == expected


def test_a_progress_bar_leaves_other_lines_in_the_tail() -> None:
    tail, splitter = Tail(), LineSplitter()
    for data in (b"begin\n", *(b"\r%d%%" % done for done in range(100)), b"\nend\n"):
        for line in splitter.feed(data):
            tail.feed(line.text, replaces=line.replaces)
    assert list(tail.lines) == ["begin", "99%", "end"]


async def test_a_progress_bar_appears_as_it_is_written() -> None:
    (out, into), (read, write) = os.pipe(), os.pipe()
    sink = OutputSink(write)
    pipe = WorkerPipe(out, "[default0]:", sink)
    for done in (b"\r10%", b"\r20%"):
        os.write(into, done)
        assert await asyncio.to_thread(os.read, read, 100) == b"[default0]:" + done[1:] + b"\n"
    pipe.close()
    sink.close(10)
    for descriptor in (into, read, write):
        os.close(descriptor)


async def test_a_log_file_on_storage_that_hangs_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """A FIFO without a reader: `open` blocks."""
    path, (out, into) = tmp_path / "stdout.log", os.pipe()
    os.mkfifo(path)
    file = FileSink(path)
    pipe = WorkerPipe(out, "", None, None, file)
    os.write(into, b"line\n")
    os.close(into)
    pipe.close()
    assert file.writing
    with path.open("rb") as reader:
        assert await asyncio.to_thread(reader.read) == b"line\n"
    wait_for_files([file], 30)
    assert not file.writing


async def test_a_log_file_that_cannot_be_opened_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").touch()
    file = FileSink(tmp_path / "folder" / "stdout.log")
    file.put(b"line\n")
    file.finish()
    await asyncio.to_thread(wait_for_files, [file], 30)
    assert "worker output is not written to a log file" in caplog.text


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


async def test_output_that_comes_faster_than_it_is_read_does_not_hold_up_a_drain() -> None:
    """A process that the worker has left behind writes again whenever some has been read."""
    out, into = os.pipe()
    written = 0

    class WritesMore(Tail):
        def feed(self, line: bytes, *, replaces: bool = False) -> None:
            nonlocal written
            super().feed(line, replaces=replaces)
            written += 1
            assert written < 100, "the drain does not end"
            os.write(into, b"again\n")

    pipe = WorkerPipe(out, "", None, WritesMore())
    os.write(into, b"first\n")
    pipe.drain()
    assert written == 2
    pipe.close()
    os.close(into)


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

"""What a script leaves open is complete after the short end of a forked worker, as under plain Python."""

from __future__ import annotations

import asyncio
import gzip
import os
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from elasticjob._runtime.agent.processes import become_subreaper
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher, WorkerStart

WRITERS = """
import atexit, bz2, dbm.dumb, gzip, io, logging, lzma, os, shelve, sqlite3, sys, tarfile, tempfile, weakref, zipfile
import helper

def function_of_the_script():  # with one, the module's names are part of a cycle
    return text

text = open("text.txt", "w"); text.write("text")
binary = open("binary.bin", "wb"); binary.write(b"binary")
random_access = open("random.bin", "w+b"); random_access.write(b"random")
packed = gzip.open("text.gz", "wt"); packed.write("packed")
packed_bytes = gzip.open("bytes.gz", "wb"); packed_bytes.write(b"packed" * 10_000)
with_bz2 = bz2.open("text.bz2", "wt"); with_bz2.write("bz2")
with_lzma = lzma.open("text.xz", "wt"); with_lzma.write("xz")
in_stack = io.TextIOWrapper(io.BufferedWriter(gzip.GzipFile("stack.gz", "wb"))); in_stack.write("stack")
zipped = zipfile.ZipFile("files.zip", "w"); zipped.writestr("member", "zipped")
tar = tarfile.open("files.tar.gz", "w:gz"); tar.add("helper.py")
shelf = shelve.Shelf(dbm.dumb.open("shelf"), writeback=True); shelf["key"] = [1]; shelf["key"].append(2)
database = sqlite3.connect("data.sqlite")
database.execute("create table t (x)"); database.execute("insert into t values (1)"); database.commit()
database.execute("insert into t values (2)")
log = logging.FileHandler("log.txt"); logging.getLogger().addHandler(log); logging.warning("logged")
memory = logging.handlers.MemoryHandler(100, target=log) if hasattr(logging, "handlers") else None
kept = {"in": [gzip.open("nested.gz", "wt")]}; kept["in"][0].write("nested")
cycle = []; cycle.append((cycle, gzip.open("cycle.gz", "wt"))); cycle[0][1].write("cycle"); del cycle
folder = tempfile.TemporaryDirectory(dir=".", prefix="temporary-")

class Finalized:
    pass
finalized = Finalized()
weakref.finalize(finalized, print, "weakref.finalize")
atexit.register(print, "atexit")

class Deleted:
    def __del__(self):
        print("__del__", text.name, function_of_the_script() is text, os.path.exists("text.txt"))
deleted = Deleted()

class DeletedWithFile:
    def __init__(self): self.file = open("deleted.txt", "w")
    def __del__(self): self.file.write("written by __del__")
deleted_with_file = DeletedWithFile()

class Raises:
    def __del__(self): raise ValueError("in __del__")
raises = Raises()

def generator():
    try:
        yield
    finally:
        print("finally", text.name)
suspended = generator(); next(suspended)
sys.stdout.write("last line without an end")
"""

HELPER = """
import gzip
of_module = gzip.open("module.gz", "wt"); of_module.write("module")
class Deleted:
    def __del__(self):
        print("__del__ of a module", of_module.name)
deleted = Deleted()
"""

ENDS = {
    "an exception": ("raise ValueError('bad')", 1),
    "an exception in a function": ("def fails(file): raise ValueError(file.name)\nfails(packed)", 1),
    "an exit code": ("sys.exit(3)", 3),
    "an exit code in a function": ("def leaves(file):\n    sys.exit(3)\nleaves(packed)", 3),
    "an interrupt": ("import signal\nos.kill(os.getpid(), signal.SIGINT)", -2),
    "success": ("", 0),
}

LEAVE_A_GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo", init_method="file://" + os.getcwd() + "/store", rank=0, world_size=1)
"""


@asynccontextmanager
async def forking(argv: list[str], preload: tuple[str, ...], log: Path) -> AsyncIterator[Launcher]:
    """Prepare a launcher whose worker is a fork."""
    become_subreaper()
    with log.open("wb") as file:
        launcher = Launcher(parse_command(argv), os.environ, preload, file.fileno(), 1)
        assert "fork server ready" in await launcher.prepare()
        try:
            yield launcher
        finally:
            launcher.stop_fork_server()


async def run_forked(folder: Path, text: str, preload: tuple[str, ...] = ("json",)) -> tuple[int, str, str]:
    """Run the script in the folder as a fork. Return exit code, stdout and stderr."""
    script = folder / "script.py"
    script.write_text(f"import os; os.chdir(os.path.dirname(__file__))\n{text}")
    output, error_output = folder.with_suffix(".out"), folder.with_suffix(".err")
    async with forking([sys.executable, str(script)], preload, folder.with_suffix(".log")) as launcher:
        with output.open("wb") as out, error_output.open("wb") as err:
            (pid,) = await launcher.start([WorkerStart({}, out.fileno(), err.fileno())])
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
    return code, output.read_text(), error_output.read_text()


def run_plain(folder: Path, text: str) -> tuple[int, str, str]:
    script = folder / "script.py"
    script.write_text(f"import os; os.chdir(os.path.dirname(__file__))\n{text}")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    return plain.returncode, plain.stdout, plain.stderr


def contents(folder: Path) -> Mapping[str, object]:
    """Return what is in each file of the folder, decompressed; an error where a file is not complete."""
    found: dict[str, object] = {}
    for path in folder.iterdir():
        if path.name not in ("__pycache__", "script.py", "store"):
            try:
                found[path.name] = content(path)
            except Exception as error:
                found[path.name] = f"{type(error).__name__}: {error}"
    return found


def content(path: Path) -> object:
    match path.suffix:
        case ".gz" if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as tar:
                return tar.getnames()
        case ".gz":
            with gzip.open(path) as packed:
                return packed.read()
        case ".zip":
            with zipfile.ZipFile(path) as files:
                return [(name, files.read(name)) for name in files.namelist()]
        case ".sqlite":
            with closing(sqlite3.connect(path)) as database:
                return database.execute("select x from t").fetchall()
        case _:
            return path.read_bytes() if path.is_file() else "a folder"


def new_folder(path: Path) -> Path:
    path.mkdir()
    (path / "helper.py").write_text(HELPER)
    return path


def errors(text: str) -> list[str]:
    """Return the lines of stderr that name an exception: Python's finalization shows no source for the others."""
    return [line for line in text.splitlines() if "Error" in line and "raise" not in line]


@pytest.mark.parametrize("ending", ENDS, ids=ENDS.keys())
async def test_every_kind_of_writer_that_is_left_open_is_complete_after_each_end(ending: str, tmp_path: Path) -> None:
    text, status = ENDS[ending]
    forked, plain = new_folder(tmp_path / "forked"), new_folder(tmp_path / "plain")
    code, out, err = await run_forked(forked, WRITERS + text)
    plain_code, plain_out, plain_err = run_plain(plain, WRITERS + text)
    assert code == plain_code == status
    assert contents(forked) == contents(plain)
    assert not list(forked.glob("temporary-*"))
    assert out == plain_out
    assert errors(err.replace(str(forked), "")) == errors(plain_err.replace(str(plain), ""))


@pytest.mark.torch
async def test_every_kind_of_writer_is_complete_if_a_successful_script_leaves_its_process_group(tmp_path: Path) -> None:
    forked, plain = new_folder(tmp_path / "forked"), new_folder(tmp_path / "plain")
    code, _, err = await run_forked(forked, WRITERS + LEAVE_A_GROUP, ("torch", "torch.distributed"))
    assert code == run_plain(plain, WRITERS)[0] == 0, err
    assert contents(forked) == contents(plain)


async def test_a_file_that_a_daemon_thread_uses_is_flushed_and_stays_open(tmp_path: Path) -> None:
    text = """
import threading, time
def write():
    file = open("thread.txt", "w")
    file.write("written")
    ready.set()
    forever.wait()
    file.write("never")
ready, forever = threading.Event(), threading.Event()
threading.Thread(target=write, daemon=True).start()
ready.wait()
raise ValueError
"""
    folder = new_folder(tmp_path / "forked")
    code, _, err = await run_forked(folder, text)
    assert (code, err.count("Traceback")) == (1, 1)
    assert (folder / "thread.txt").read_text() == "written"


async def test_an_error_of_a_destructor_in_an_object_that_a_library_keeps_is_shown(tmp_path: Path) -> None:
    text = """
import json
class Broken:
    def __del__(self):
        raise ValueError("of the destructor")
json.kept = [Broken()]
raise ValueError("of the script")
"""
    code, _, err = await run_forked(new_folder(tmp_path / "forked"), text)
    assert code == 1
    assert "Exception ignored in" in err
    assert errors(err) == ["ValueError: of the script", "ValueError: of the destructor"]


async def test_a_compressed_file_that_only_a_logging_handler_refers_to_is_complete(tmp_path: Path) -> None:
    """Python's finalization truncates this one: it closes the file below before the text above it."""
    text = """
import gzip, logging
stream_handler = logging.StreamHandler(gzip.open("log.gz", "wt"))
logging.getLogger("packed").addHandler(stream_handler)
logging.getLogger("packed").warning("packed log")
raise ValueError
"""
    folder = new_folder(tmp_path / "forked")
    await run_forked(folder, text)
    assert content(folder / "log.gz") == b"packed log\n"

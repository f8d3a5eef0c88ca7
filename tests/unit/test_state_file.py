"""The file of a training state: atomic, never an older state over a newer one, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.snapshot_format import state_file
from elasticjob._runtime.contract.snapshot_format.state_file import (
    BlockChangedError,
    read_file_header,
    recorded_interval,
    save_block,
)
from support.training.state_blocks import memory, write


def test_a_save_never_replaces_a_newer_state_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert save_block(memory(5, data=b"five"), path)
    assert not save_block(memory(5), path)
    assert not save_block(memory(4), path)
    assert save_block(memory(6), path)
    assert save_block(memory(2, sequence=2), path), "a rollback"
    assert read_file_header(path).version == (2, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_failed_save_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "state")
    save_block(memory(5), path)

    def disk_full(*_: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "sendfile", disk_full)
    with pytest.raises(OSError, match="no space"):
        save_block(memory(6), path)
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_the_newest_block_is_saved_to_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert state_file.save_to_recorded_path([memory(5, path), memory(6, path)]) == path
    assert read_file_header(path).step == 6
    assert state_file.save_to_recorded_path([memory(5, path), memory(6, path)]) == ""
    assert state_file.save_to_recorded_path([memory(7, None), memory()]) == ""
    assert state_file.save_to_recorded_path([memory(), memory()]) == ""


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = str(tmp_path / "state"), os.sendfile
    save_block(memory(5), path)
    block = memory(6, data=b"a" * 1000)

    def commit_meanwhile(out: int, source: int, offset: int, count: int) -> int:
        sent = original(out, source, offset, count // 2 or count)
        write(block, 8, None, b"b" * 1000, sequence=2)
        return sent

    monkeypatch.setattr(os, "sendfile", commit_meanwhile)
    with pytest.raises(BlockChangedError):
        save_block(block, path)
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_of_several_nodes_one_writes_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = str(tmp_path / "state"), os.sendfile
    writes, others_wait, waiting = [], threading.Event(), set()
    flock = fcntl.flock

    def counted_lock(file: Any, operation: int) -> None:
        waiting.add(threading.get_ident())
        if len(waiting) == 3:
            others_wait.set()
        flock(file, operation)

    def counted(out: int, source: int, offset: int, count: int) -> int:
        others_wait.wait(20)
        writes.append(source)
        return original(out, source, offset, count)

    monkeypatch.setattr(os, "sendfile", counted)
    monkeypatch.setattr(fcntl, "flock", counted_lock)
    saved = []
    nodes = [threading.Thread(target=lambda: saved.append(save_block(memory(5), path))) for _ in range(3)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(20)
    assert (len(writes), sorted(saved)) == (1, [False, False, True])
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_without_locks_each_node_writes_its_own_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, names, replace = str(tmp_path / "state"), [], os.replace

    def recorded(source: str, target: str) -> None:
        names.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    assert save_block(memory(5), path)
    assert names[0].startswith(f"{path}.{os.uname().nodename}-{os.getpid()}-")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_temporary_file_that_a_lost_node_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    (tmp_path / "state.tmp").write_bytes(b"x" * 100_000)
    assert save_block(memory(5), str(path))
    assert path.stat().st_size < 1000
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def _link(temporary: Path, victim: Path) -> None:
    temporary.symlink_to(victim)


def _second_name(temporary: Path, victim: Path) -> None:
    temporary.hardlink_to(victim)


def _pipe(temporary: Path, _: Path) -> None:
    os.mkfifo(temporary)


def _folder(temporary: Path, _: Path) -> None:
    temporary.mkdir()


def _file_of_another_user(temporary: Path, _: Path) -> None:
    temporary.write_bytes(b"theirs")
    os.chown(temporary, 12345, -1)


@pytest.mark.parametrize("planted", [_link, _second_name, _pipe, _folder, _file_of_another_user])
def test_what_another_user_plants_under_the_temporary_name_is_not_used(
    tmp_path: Path, planted: Callable[[Path, Path], None]
) -> None:
    if planted is _file_of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path, victim, temporary = tmp_path / "state", tmp_path / "victim", tmp_path / "state.tmp"
    victim.write_bytes(b"precious")
    planted(temporary, victim)
    before = temporary.lstat()
    assert save_block(memory(5), str(path))
    assert read_file_header(str(path)).step == 5
    assert path.is_file()
    assert not path.is_symlink()
    assert victim.read_bytes() == b"precious"
    assert os.path.samestat(temporary.lstat(), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.tmp", "victim"]


def test_a_lock_that_another_process_keeps_does_not_stop_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "LOCK_TIMEOUT", 0.1)
    temporary = tmp_path / "state.tmp"
    temporary.touch()
    with temporary.open("rb") as kept:
        fcntl.flock(kept, fcntl.LOCK_SH)
        assert save_block(memory(5), str(tmp_path / "state"))
        assert save_block(memory(6), str(tmp_path / "state"))
    assert read_file_header(str(tmp_path / "state")).step == 6


def test_a_node_waits_while_another_one_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the other node grows at each look: longer than LOCK_TIMEOUT, which counts from the last growth."""
    monkeypatch.setattr(state_file, "LOCK_TIMEOUT", 0.5)
    temporary, looks = tmp_path / "state.tmp", []
    writer = temporary.open("wb", buffering=0)
    fcntl.flock(writer, fcntl.LOCK_EX)

    def writes_on(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) < 40:
            writer.write(b"x")
        elif not writer.closed:
            temporary.rename(tmp_path / "state")
            writer.close()
        sleep(0.02)

    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", writes_on)
    names, replace = [], os.replace

    def recorded(source: str, target: str) -> None:
        names.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    assert save_block(memory(5), str(tmp_path / "state"))
    assert names == [str(temporary)]
    assert read_file_header(str(tmp_path / "state")).step == 5


def test_others_can_read_a_saved_state_as_the_umask_says_but_not_its_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original, modes = tmp_path / "state", os.sendfile, []

    def recorded(*arguments: int) -> int:
        modes.append((tmp_path / "state.tmp").stat().st_mode & 0o777)
        return original(*arguments)

    monkeypatch.setattr(os, "sendfile", recorded)
    before = os.umask(0o027)
    try:
        (tmp_path / "state.tmp").touch(0o666)
        assert save_block(memory(5), str(path))
    finally:
        os.umask(before)
    assert set(modes) == {0o600}
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_in_place_of_the_state_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    os.mkfifo(path)
    assert read_file_header(str(path)).step == -1
    assert save_block(memory(5), str(path))
    assert read_file_header(str(path)).step == 5


class Fails:
    """A call of the operating system that fails a number of times, before or after it has been executed."""

    def __init__(self, call: Callable[..., Any], error: int, times: int = 1, *, executed: bool = False) -> None:
        self._call, self._error, self._times, self._executed = call, error, times, executed
        self.failed = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.failed == self._times:
            return self._call(*arguments, **named)
        self.failed += 1
        if self._executed:
            self._call(*arguments, **named)
        raise OSError(self._error, os.strerror(self._error))


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.mark.parametrize(
    ("call", "error"),
    [("replace", errno.ENOENT), ("replace", errno.EEXIST), ("replace", errno.EIO), ("unlink", errno.ENOENT)],
)
def test_a_call_that_a_server_executed_and_reported_as_failed_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    path = str(tmp_path / "state")
    save_block(memory(5), path)
    lost_answer = Fails(getattr(os, call), error, executed=True)
    monkeypatch.setattr(os, call, lost_answer)
    assert save_block(memory(6), path)
    assert lost_answer.failed == 1
    assert read_file_header(path).step == 6
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_save_that_the_server_refuses_keeps_the_old_state_and_raises_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    path = str(tmp_path / "state")
    save_block(memory(5), path)
    monkeypatch.setattr(os, call, Fails(getattr(os, call), error))
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        save_block(memory(6), path)
    assert read_file_header(path).step == 5
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert save_block(memory(6), path)


@pytest.mark.parametrize(("module", "call"), [(fcntl, "flock"), (os, "fstat"), (os, "pread"), (os, "open")])
def test_files_that_another_client_replaced_are_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    path = str(tmp_path / "state")
    save_block(memory(5), path)
    block = memory(6)
    fails = Fails(getattr(module, call), errno.ESTALE)
    if call in ("pread", "fstat"):  # and not for the block, which is memory
        stale, works = path if call == "pread" else f"{path}.tmp", getattr(module, call)

        def fails_there(descriptor: int, *more: Any) -> Any:
            return (fails if _path_of(descriptor) == stale else works)(descriptor, *more)

        monkeypatch.setattr(os, call, fails_there)
    else:
        monkeypatch.setattr(module, call, fails)
    assert save_block(block, path)
    assert fails.failed == 1
    assert read_file_header(path).step == 6
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_shared_file_that_stays_stale_is_replaced_by_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Fails(fcntl.flock, errno.ESTALE, times=1000)
    monkeypatch.setattr(fcntl, "flock", stale)
    assert save_block(memory(5), str(tmp_path / "state"))
    assert read_file_header(str(tmp_path / "state")).step == 5
    assert 1 < stale.failed < 1000


def test_a_node_whose_lock_manager_fails_leaves_the_file_that_another_node_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, theirs = str(tmp_path / "state"), tmp_path / "state.tmp"
    theirs.write_bytes(b"written by another node")
    monkeypatch.setattr(fcntl, "flock", Fails(fcntl.flock, errno.ENOLCK))
    assert save_block(memory(5), path)
    assert theirs.read_bytes() == b"written by another node"


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_state_that_cannot_be_read_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """Else the training would begin again, or an older state would replace it."""
    path, older = str(tmp_path / "state"), memory(4)
    save_block(memory(5), path)
    before = Path(path).read_bytes()
    reads = getattr(os, call)
    monkeypatch.setattr(os, call, Fails(reads, error))
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        read_file_header(path)

    def unreadable(opened: Any, *arguments: Any) -> Any:
        if opened == path or (call == "pread" and _path_of(opened) == path):
            raise OSError(error, os.strerror(error))
        return reads(opened, *arguments)

    monkeypatch.setattr(os, call, unreadable)
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        save_block(older, path)
    monkeypatch.undo()
    assert Path(path).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("more", "seconds"),
    [({}, 0.0), ({"save_minutes": 2}, 120.0), ({"save_minutes": "x"}, 0.0), ({"save_minutes": -1}, 0.0)],
)
def test_the_interval_that_a_block_asks_for(more: dict[str, object], seconds: float) -> None:
    assert recorded_interval([memory(1, **more), memory()]) == seconds  # type: ignore[arg-type]
    assert recorded_interval([memory(), memory()]) == 0.0

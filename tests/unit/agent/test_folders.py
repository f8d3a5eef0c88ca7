"""Where an agent keeps its own files, and what it does on a node where few folders are writable."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.agent import folders
from elasticjob._runtime.agent.config import UsageError, read_config
from elasticjob._runtime.agent.folders import (
    MAX_PATH,
    NodeFolders,
    find_folders,
    first_writable,
    scratch_folders,
    temporary_folders,
)
from elasticjob._runtime.contract.names import Env

ENV = {
    Env.RUN_ID: "uid",
    Env.NODE_KEY: "00ff",
    Env.INDEX: "2",
    Env.POD_NAME: "job-2-1",
    Env.POD_IP: "10.0.0.7",
    Env.STORE_ENDPOINT: "job-rdzv:29400",
}
CODE = "/elasticjob/agent.pyz"


def only_writable(patch: pytest.MonkeyPatch, *paths: str) -> None:
    patch.setattr(folders, "first_writable", lambda tried: next((path for path in tried if path in paths), None))


def test_the_temporary_folders_are_those_of_tempfile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("TMPDIR", "/a"), ("TEMP", "b"), ("TMP", "")):
        monkeypatch.setenv(name, path)
    theirs = tempfile._candidate_tempdir_list()  # type: ignore[attr-defined]
    assert list(temporary_folders(os.environ, str(Path.cwd()))) == [str(Path.cwd() / path) for path in theirs]


@pytest.mark.parametrize(
    ("writable", "found"),
    [
        (("/tmp", "/dev/shm", "/job"), NodeFolders("/tmp", "/tmp")),
        (("/data", "/tmp", "/dev/shm"), NodeFolders("/data", "/data")),
        (("/dev/shm", "/elasticjob"), NodeFolders("/dev/shm", None)),
        (("/dev/shm", "/job"), NodeFolders("/dev/shm", "/job")),
        (("/elasticjob", "/job"), NodeFolders("/elasticjob", "/job")),
        (("/job",), NodeFolders("/job", "/job")),
        ((), None),
    ],
)
def test_the_agents_files_are_on_disk_else_in_memory(
    writable: tuple[str, ...], found: NodeFolders | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_writable(monkeypatch, *writable)
    monkeypatch.setattr(os, "getcwd", lambda: "/job")
    assert find_folders({"TMPDIR": "/data"}, CODE) == found


def test_folders_whose_paths_are_too_long_for_a_unix_socket_are_left_out() -> None:
    assert scratch_folders(("/" + 80 * "x", "/job"), "/code") == ("/dev/shm", "/job")


def test_a_folder_is_writable_if_a_file_can_be_written(tmp_path: Path) -> None:
    assert first_writable([str(tmp_path / "absent"), "/proc/self", str(tmp_path)]) == str(tmp_path)
    assert first_writable(["/proc/self"]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_working_folder_that_was_removed_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    found = find_folders({"TMPDIR": "/dev/shm"}, CODE)
    assert found == NodeFolders("/dev/shm", "/dev/shm")


def test_the_agents_own_files_are_in_the_folder_that_it_is_given_unless_its_path_is_too_long(tmp_path: Path) -> None:
    usual = find_folders({}, CODE)
    assert usual is not None
    short, long = Path(tempfile.mkdtemp()), tmp_path / ("x" * MAX_PATH)
    long.mkdir()
    try:
        assert find_folders({"ELASTICJOB_SCRATCH_DIR": str(short)}, CODE) == replace(usual, scratch=str(short))
        assert find_folders({"ELASTICJOB_SCRATCH_DIR": str(long)}, CODE) == usual
    finally:
        short.rmdir()


def test_without_any_writable_folder_the_agent_says_what_to_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    only_writable(monkeypatch)
    with pytest.raises(UsageError, match="mount an emptyDir at /tmp"):
        read_config(ENV)


def test_workers_get_a_temporary_folder_only_where_they_would_find_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TMPDIR" not in read_config(ENV).env
    only_writable(monkeypatch, "/dev/shm")
    config = read_config(ENV)
    assert (config.env["TMPDIR"], config.scratch_parent) == ("/dev/shm", "/dev/shm")


def test_log_files_need_a_disk_or_the_folder_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    only_writable(monkeypatch, "/dev/shm")
    for name in ("PET_REDIRECTS", "PET_TEE"):
        with pytest.raises(UsageError, match="PET_LOG_DIR"):
            read_config({**ENV, name: "0:1"})
    assert read_config({**ENV, "PET_TEE": "3", "PET_LOG_DIR": "/l"}).logs.directory == "/l"
    assert read_config({**ENV, "PET_TEE": "0"}).logs.directory == ""

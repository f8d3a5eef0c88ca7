"""Walks of the cluster's clean-up over folders that vanish meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import cgroups, leftovers
from host import files


@contextmanager
def changing(root: Path) -> Iterator[None]:
    """Create and remove folders with a file below `root` all the time."""
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for number in range(8):
                group = root / f"pod{number}" / "container"
                group.mkdir(parents=True, exist_ok=True)
                (group / "cgroup.procs").write_text("")
                (group / "cgroup.procs").unlink()
                group.rmdir()
                group.parent.rmdir()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_processes_of_control_groups_that_vanish_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    node = tmp_path / "cpu" / "ejnode1"
    node.mkdir(parents=True)
    (node / "cgroup.procs").write_text("7\n8\n")
    with changing(node), changing(tmp_path / "memory"):
        assert all(cgroups.pids("ejnode*") == {7, 8} for _ in range(500))


def test_control_groups_that_others_remove_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)

    def remove_together() -> list[BaseException]:
        errors: list[BaseException] = []
        (tmp_path / "ejnode1" / "kubepods" / "burstable").mkdir(parents=True)

        def remove() -> None:
            try:
                cgroups.remove("ejnode*")
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=remove) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    assert [errors for _ in range(100) if (errors := remove_together())] == []
    assert cgroups.roots("ejnode*") == []


def test_shared_folders_that_change_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state, results = tmp_path / "state", tmp_path / "results"
    results.mkdir()
    (results / "ours").write_text(f'{{"path": "{state}/node1"}}')
    (results / "theirs").write_text('{"path": "/elsewhere"}')
    monkeypatch.setattr(leftovers, "CNI_RESULTS", results)
    monkeypatch.setattr(leftovers, "CONTAINER_LINKS", tmp_path / "absent")
    monkeypatch.setattr(leftovers, "DEVICE_PLUGINS", tmp_path / "absent")
    (results / "gone").symlink_to(tmp_path / "gone")
    leftovers.remove_shared(state)
    assert [path.name for path in files.children(results)] == ["gone", "theirs"]

"""Processes that use a GPU must not fork workers. /proc and CUDA's driver are fakes: no GPU is needed."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.fork_server import self_test

NOT_INITIALIZED, NO_DEVICE = 3, 100

MAPS = """\
55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f00a0000000-7f00a0021000 rw-p 00000000 00:00 0
7f00b0000000-7f00b0021000 r-xp 00000000 08:01 977 /usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15
7f00b0021000-7f00b0041000 rw-p 00021000 08:01 977 /usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15
7f00c0000000-7f00c0021000 r-xp 00000000 08:01 978 /usr/lib/libcudart.so.12
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in /proc of a process with one open file and no driver."""
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    (tmp_path / "maps").write_text(MAPS.replace("libcuda.so.550", "libother.so.550"))
    monkeypatch.setattr(self_test, "PROCESS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ([], ""),
        (["/dev/nvidiactl"], ""),
        (["/dev/nvidiactl", "/dev/nvidia0"], "importing the preloaded modules opened /dev/nvidia0"),
        (
            ["/dev/nvidia1", "/dev/nvidia-uvm", "/dev/nvidia1"],
            "importing the preloaded modules opened /dev/nvidia-uvm, /dev/nvidia1",
        ),
    ],
)
def test_an_open_gpu(process: Path, devices: list[str], reason: str) -> None:
    for number, path in enumerate(devices, 5):
        (process / "fd" / str(number)).symlink_to(path)
    assert self_test.check_gpus() == ({"ready": False, "reason": reason} if reason else None)


@pytest.mark.parametrize(("code", "initialized"), [(0, True), (NOT_INITIALIZED, False), (NO_DEVICE, False)])
def test_an_initialized_driver(process: Path, monkeypatch: pytest.MonkeyPatch, code: int, initialized: bool) -> None:
    class Driver:
        def __init__(self, path: str) -> None:
            assert path == "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15"

        def cuDeviceGetCount(self, _: Any) -> int:  # noqa: N802  (a function of CUDA's driver)
            return code

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert self_test.check_gpus() is None, "there is no driver in memory"
    (process / "maps").write_text(MAPS)
    reason = "importing the preloaded modules initialized CUDA's driver"
    assert self_test.check_gpus() == ({"ready": False, "reason": reason} if initialized else None)


def test_a_driver_whose_file_has_been_replaced_counts_as_unused(process: Path) -> None:
    (process / "maps").write_text(MAPS.replace("/usr/lib/x86_64-linux-gnu", str(process)))
    assert self_test.check_gpus() is None


def test_this_process_uses_no_gpu() -> None:
    assert self_test.check_gpus() is None


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of the garbage collections since the test began; the thresholds are restored after it."""
    before = gc.get_threshold()
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    yield phases
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_imports_are_not_interrupted_by_garbage_collections(collections: list[str]) -> None:
    gc.set_threshold(100, 5, 5)
    with self_test.no_garbage_collections():
        before = len(collections)
        kept: list[list[int]] = [[] for _ in range(10_000)]
        during = len(collections) - before
    assert (during, gc.get_threshold(), gc.isenabled()) == (0, (100, 5, 5), True)
    before = len(collections)
    kept += [[] for _ in range(10_000)]
    assert len(collections) > before


def test_a_threshold_that_an_import_sets_stays(collections: list[str]) -> None:
    with self_test.no_garbage_collections():
        gc.set_threshold(50_000, 20, 20)
    assert gc.get_threshold() == (50_000, 20, 20)

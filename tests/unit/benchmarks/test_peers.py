"""Which of the other libraries are sides of a row, and how their processes are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import peers
from benchmarks.row import Row, Sample
from benchmarks.run import measure


def install(venvs: Path, folder: str, distribution: str) -> None:
    (venvs / folder / "lib" / "python3.11" / "site-packages" / f"{distribution}.dist-info").mkdir(parents=True)


def test_a_library_without_a_venv_is_left_out(tmp_path: Path) -> None:
    assert peers.installed(tmp_path) == {}
    assert peers.note(tmp_path) == ""
    assert peers.left_out(tmp_path) == f"without {peers.NVIDIA} and {peers.TORCHFT}, which `make peers` installs"


def test_an_installed_library_is_a_side_and_the_note_has_its_version(tmp_path: Path) -> None:
    install(tmp_path, "torchft", "torchft_nightly-2026.10.26")
    assert peers.installed(tmp_path) == {peers.TORCHFT: peers.Torchft}
    assert peers.left_out(tmp_path) == f"without {peers.NVIDIA}, which `make peers` installs"
    assert f"{peers.TORCHFT} 2026.10.26: " in peers.note(tmp_path)
    assert peers.NVIDIA not in peers.note(tmp_path)


def test_a_venv_whose_installation_failed_is_no_side(tmp_path: Path) -> None:
    install(tmp_path, "nvidia", "torch-2.15.0")
    assert peers.installed(tmp_path) == {}


def test_nothing_is_left_out_with_all_libraries(tmp_path: Path) -> None:
    install(tmp_path, "nvidia", "nvidia_resiliency_ext-0.4.1")
    install(tmp_path, "torchft", "torchft-0.2.0")
    assert set(peers.installed(tmp_path)) == {peers.NVIDIA, peers.TORCHFT}
    assert peers.left_out(tmp_path) == ""


def test_a_row_says_which_sides_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("name", "title", "s", None, {"ours": lambda _: Sample(1.0)}, {}, 1, left_out="without torchft")
    measure(row, 1)
    assert "(without torchft)" in capsys.readouterr().out


def test_a_process_is_found_by_its_mark_in_a_session_of_its_own(tmp_path: Path) -> None:
    marks = [f"{tmp_path}:{index}:" for index in (1, 11)]
    waits = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    processes = [
        subprocess.Popen(
            waits, env={**os.environ, peers.MARK: mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for mark in marks
    ]  # fmt: skip
    try:
        for process in processes:  # the kernel shows no environment for a moment after exec
            assert process.stdout is not None
            process.stdout.readline()
        found = [peers.marked(mark) for mark in marks]
        assert found == [[process.pid] for process in processes]
        assert sorted(peers.marked(f"{tmp_path}:")) == sorted(process.pid for process in processes)
    finally:
        for process in processes:
            process.communicate()

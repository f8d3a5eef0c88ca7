"""Health checks: given what the machine says, what is wrong with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elasticjob.agent.monitoring import node_health
from elasticjob.agent.monitoring.node_health import Gpus, KernelLog, NodeHealth

FINE = "0, 0, No, No\n1, 0, No, No\n"


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        (FINE, ""),
        ("0, [N/A], [N/A], [N/A]\n1, [N/A], [N/A], [N/A]\n", ""),
        ("0, 0, No, No\n", "1 of 2 GPUs are there"),
        ("0, 0, No, No\n1, 3, Yes, No\n", "GPU 1: its memory has errors and needs a reset"),
        ("0, 0, No, Yes\n1, 0, No, No\n", "GPU 0: its memory has errors that can no longer be mapped away"),
        (
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover\n",
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover",
        ),
        ("No devices were found\n", "No devices were found"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            "has failed because it couldn't communicate with the NVIDIA driver.",
        ),
        ('Field "remapped_rows.failure" is not a valid field to query.\n', ""),
        ("", ""),
    ],
)
def test_what_nvidia_smi_says(said: str, trouble: str) -> None:
    assert Gpus(2).evaluate(said) == trouble


def test_memory_errors_of_the_past_are_forgiven_new_ones_are_not() -> None:
    gpus = Gpus(1)
    assert gpus.evaluate("0, 2, No, No\n") == ""
    assert gpus.evaluate("0, 2, No, No\n") == ""
    assert gpus.evaluate("0, 3, No, No\n") == "GPU 0: an uncorrectable memory error"


def test_a_clock_that_was_never_set() -> None:
    assert node_health.check_clock(time.time()) == ""
    assert node_health.check_clock(0.0) == "the clock says 1970-01-01"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    assert node_health.check_disk(str(tmp_path)) == ""
    assert node_health.check_disk("/proc/self") != ""
    assert node_health.check_disk(str(tmp_path / "absent")).endswith("No such file or directory")


def test_shared_memory_that_is_full_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_health.check_shared_memory(str(tmp_path)) == ""
    assert node_health.check_shared_memory(str(tmp_path / "absent")) == ""
    monkeypatch.setattr(node_health, "MIN_SHARED_MEMORY", 1 << 62)
    assert node_health.check_shared_memory(str(tmp_path)) != ""


def test_fatal_errors_in_the_kernels_log_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    kernel = KernelLog(str(path))
    assert kernel.fatal() == ""
    with path.open("a") as log:
        log.write("6,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU fault\n")
    assert kernel.fatal() == ""
    with path.open("a") as log:
        log.write("4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE\n")
    assert kernel.fatal() == "NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE"
    kernel.close()
    assert KernelLog(str(tmp_path / "absent")).fatal() == ""


def smi(folder: Path, text: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("gpus", "said", "trouble"),
    [(2, FINE, ""), (2, "No devices were found\n", "No devices were found"), (0, "No devices were found\n", "")],
)
async def test_a_node_is_asked_for_the_gpus_that_it_was_given(
    tmp_path: Path, gpus: int, said: str, trouble: str
) -> None:
    spared: set[int] = set()
    assert await NodeHealth(str(tmp_path), gpus, smi(tmp_path, said), spared).find_problem() == trouble
    assert spared == set()


async def test_without_nvidia_smi_gpus_are_not_looked_at(tmp_path: Path) -> None:
    assert await NodeHealth(str(tmp_path), 8, {"PATH": str(tmp_path)}, set()).find_problem() == ""


async def test_gpus_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "print('GPU 3 does not compute: an uncorrectable memory error')"
    monkeypatch.setattr(node_health, "_COMPUTE", broken)
    spared: set[int] = set()
    node = NodeHealth(str(tmp_path), 4, {"PATH": str(tmp_path)}, spared)
    assert await node.find_problem() == "GPU 3 does not compute: an uncorrectable memory error"
    assert await node.find_problem() == ""
    assert spared == set()


async def test_gpus_that_cannot_be_tried_are_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "elasticjob")
    monkeypatch.setattr(node_health, "CUDA", "libabsent.so")
    assert await NodeHealth(str(tmp_path), 1, {"PATH": str(tmp_path)}, set()).find_problem() == ""
    assert "GPUs were not tried: libabsent.so: " in caplog.text


async def test_a_check_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(node_health, "check_disk", lambda _: os.read(read, 1).decode())
    assert "hang" in await NodeHealth(str(tmp_path), 0, {}, set()).find_problem(deadline=0.05)
    os.close(write)


async def test_a_broken_check_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_health, "check_clock", lambda _: 1 / 0)
    assert await NodeHealth(str(tmp_path), 0, {}, set()).find_problem() == ""

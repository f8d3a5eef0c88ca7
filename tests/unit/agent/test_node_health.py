"""Health checks: the problem that each check finds for a given state of the machine."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from elasticjob._runtime.agent.monitoring.node import node_health
from elasticjob._runtime.agent.monitoring.node.node_health import Gpus, HealthProblem, KernelLog, NodeHealth

HEALTHY = "0, 0, No, No\n1, 0, No, No\n"


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (HEALTHY, ""),
        ("0, [N/A], [N/A], [N/A]\n1, [N/A], [N/A], [N/A]\n", ""),
        ("0, 0, No, No\n", "nvidia-smi lists 1 of 2 GPUs"),
        ("0, 0, No, No\n1, 3, Yes, No\n", "GPU 1: a memory row remapping is pending; reset the GPU"),
        ("0, 0, No, Yes\n1, 0, No, No\n", "GPU 0: memory row remapping failed; replace the GPU"),
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
def test_problems_in_the_output_of_nvidia_smi(output: str, problem: str) -> None:
    assert Gpus(2).evaluate(output) == problem


def test_only_new_memory_errors_count() -> None:
    gpus = Gpus(1)
    assert gpus.evaluate("0, 2, No, No\n") == ""
    assert gpus.evaluate("0, 2, No, No\n") == ""
    assert gpus.evaluate("0, 3, No, No\n") == "GPU 0: uncorrectable memory error"


def test_a_clock_that_was_never_set() -> None:
    assert node_health.check_clock(time.time()) == ""
    assert node_health.check_clock(0.0) == "the clock is not set: 1970-01-01"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
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
    ("gpus", "output", "problem"),
    [(2, HEALTHY, ""), (2, "No devices were found\n", "No devices were found"), (0, "No devices were found\n", "")],
)
async def test_nvidia_smi_must_list_the_gpus_that_the_pod_requests(
    tmp_path: Path, gpus: int, output: str, problem: str
) -> None:
    helper_pids: set[int] = set()
    node = NodeHealth(str(tmp_path), gpus, smi(tmp_path, output), helper_pids)
    assert await node.find_problem() == (HealthProblem(problem) if problem else None)
    assert helper_pids == set()


async def test_without_nvidia_smi_gpus_are_not_checked(tmp_path: Path) -> None:
    assert await NodeHealth(str(tmp_path), 8, {"PATH": str(tmp_path)}, set()).find_problem() is None


async def test_the_compute_check_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "print('GPU 3 failed the compute check: uncorrectable memory error')"
    monkeypatch.setattr(node_health, "COMPUTE_CHECK", broken)
    helper_pids: set[int] = set()
    node = NodeHealth(str(tmp_path), 4, {"PATH": str(tmp_path)}, helper_pids)
    assert await node.find_problem() == HealthProblem("GPU 3 failed the compute check: uncorrectable memory error")
    assert await node.find_problem() is None
    assert helper_pids == set()


async def test_gpus_without_a_driver_count_as_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "elasticjob")
    monkeypatch.setattr(node_health, "CUDA", "libabsent.so")
    assert await NodeHealth(str(tmp_path), 1, {"PATH": str(tmp_path)}, set()).find_problem() is None
    assert "skipped the compute check of GPUs: libabsent.so: " in caplog.text


async def test_a_check_that_hangs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(node_health, "check_disk", lambda _: os.read(read, 1).decode())
    problem = await NodeHealth(str(tmp_path), 0, {}, set()).find_problem(timeout=0.05)
    os.close(write)
    assert problem is not None
    assert "hang" in problem.text
    assert problem.suspected, "a slow disk is not a broken one"


@pytest.mark.parametrize(
    ("number", "suspected"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.EROFS, False)]
)
async def test_full_storage_is_only_a_suspicion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, suspected: bool
) -> None:
    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    problem = await NodeHealth(str(tmp_path), 0, {}, set()).find_problem()
    assert problem == HealthProblem(f"the disk at {tmp_path}: {os.strerror(number)}", suspected)


async def test_a_check_that_raises_is_no_problem_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_health, "check_clock", lambda _: 1 / 0)
    assert await NodeHealth(str(tmp_path), 0, {}, set()).find_problem() is None

"""A command that starts launchers runs once in its pod, and their ranks are the pod's workers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest

RANK = """
import os, sys
text = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {os.environ['ROLE_NAME']} {sys.argv[1:]}"
print(f"{text} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
"""
FAILS_ONCE = (
    RANK
    + """
import pathlib, signal
pathlib.Path(f"began-{os.environ['RANK']}").touch()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] != "1":
        signal.pause()
    while len(list(pathlib.Path().glob("began-*"))) < 4:
        os.sched_yield()
    sys.exit(3)
"""
)
"""Rank 1 fails once all ranks run, and the others wait for their end."""
WHERE = """
import os
from elasticjob._runtime.system.process_placement import read_placement
found = read_placement(os.getpid())
print("cpus", set(found.processors), "nice", f"+{found.nice - int(os.environ['NICE'])}", found.memory, flush=True)
"""
STAYS = RANK + "import pathlib, signal; pathlib.Path('stays-' + os.environ['RANK']).touch(); signal.pause()"
GROUP = 'import torch.distributed as d; d.init_process_group("gloo")'
UNTIL_STAYS = "until [ -e stays-0 ] && [ -e stays-1 ]; do sleep 0.05; done"


def run(
    folder: Path,
    script: str,
    *,
    pods: int = 1,
    preload: tuple[str, ...] = ("json",),
    max_restarts: int = 3,
    **spec: Any,
) -> LocalRun:
    """Start a job whose pods run a shell script, with two workers each."""
    for name, text in {"rank.py": RANK, "fails_once.py": FAILS_ONCE, "stays.py": STAYS}.items():
        (folder / name).write_text(text)
    job = manifest(
        ["bash", "-c", script],
        replicas=pods, nprocPerNode=2, preload=list(preload), failurePolicy={"maxRestarts": max_restarts}, **spec,
    )  # fmt: skip
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [  # type: ignore[index]
        {"name": "PATH", "value": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        {"name": "NICE", "value": str(os.nice(0))},
    ]
    return LocalRun(job, folder)


def lines(job: LocalRun, text: str) -> list[str]:
    return [line.split("]:", 1)[1] for line in job.text.splitlines() if "]:" in line and text in line]


@pytest.mark.parametrize("preload", [("json",), ()], ids=["forks", "exec"])
def test_a_failed_rank_restarts_below_the_command_that_waits(preload: tuple[str, ...], tmp_path: Path) -> None:
    script = "echo before; torchrun --role r fails_once.py a; echo between; torchrun rank.py two && echo after"
    with run(tmp_path, script, pods=2, preload=preload) as job:
        assert job.exit_code() == 0, job.text
    for word in ("before", "between", "after"):
        assert lines(job, word) == [word, word], job.text
    for number, (arguments, role) in {0: ("['a']", "r"), 1: ("['a']", "r"), 2: ("['two']", "default")}.items():
        found = sorted(lines(job, f"{role} {arguments} restart {min(number, 1)}"))
        assert found == [f"rank {rank} of 4 {role} {arguments} restart {min(number, 1)}" for rank in range(4)], job.text
    assert "1 restart" in job.text


def test_python_before_a_launcher_runs_once_too(tmp_path: Path) -> None:
    with run(tmp_path, "python rank.py one && torchrun rank.py two") as job:
        assert job.exit_code() == 0, job.text
    assert lines(job, "['one']") == ["rank 0 of 2 default ['one'] restart 0"], job.text
    assert len(lines(job, "['two']")) == 2, job.text


def test_ranks_have_the_processors_the_memory_policy_and_the_priority_of_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    memory = "numactl --membind=0" if shutil.which("numactl") else ""
    cpu = min(os.sched_getaffinity(0))
    with run(tmp_path, f"echo before; nice -n 3 taskset -c {cpu} {memory} torchrun where.py; echo after") as job:
        assert job.exit_code() == 0, job.text
    assert lines(job, "cpus") == [f"cpus {{{cpu}}} nice +3 {'bind:0' if memory else 'default'}"] * 2, job.text
    assert (lines(job, "before"), lines(job, "after")) == (["before"], ["after"]), job.text


def test_options_of_logs_count_and_the_output_goes_where_the_launcher_s_goes(tmp_path: Path) -> None:
    script = (
        "torchrun --tee 3 --local-ranks-filter 1 --log-dir logs rank.py > all.txt;"
        " torchrun --local-addr=10.0.0.9 rank.py | sed s/^/to-sed-/"
    )
    with run(tmp_path, script) as job:
        assert job.exit_code() == 0, job.text
    assert "--local-addr (the address is the pod's; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in job.text
    assert (tmp_path / "all.txt").read_text() == "[default1]:rank 1 of 2 default [] restart 0\n", job.text
    files = sorted(path.read_text() for path in (tmp_path / "logs").glob("*/*/*/stdout.log"))
    assert files == [f"rank {rank} of 2 default [] restart 0\n" for rank in range(2)]
    assert sorted(lines(job, "rank ")[:2]) == [f"to-sed-rank {rank} of 2 default [] restart 0" for rank in range(2)]


def test_a_launcher_passes_its_signals_on_and_gets_the_exit_code(tmp_path: Path) -> None:
    script = f"torchrun stays.py & {UNTIL_STAYS}; kill $!; wait $!; echo code $?"
    with run(tmp_path, script) as job:
        assert job.exit_code() == 0, job.text
    assert lines(job, "code") == ["code 143"], job.text
    assert "0 restarts" in job.text


@pytest.mark.parametrize(
    ("script", "reason", "message"),
    [
        ("torchrun --nproc-per-node=3 rank.py; echo on", "CommandRefused", "set spec.nprocPerNode: 3"),
        (f"torchrun stays.py & {UNTIL_STAYS}; torchrun rank.py; echo on", "TrainsApart", "two launchers run"),
        (
            f"torchrun rank.py two; python -c '{GROUP}'; echo on",
            "TrainsApart",
            "start what trains by a launcher",
        ),
    ],
    ids=["number", "two at once", "a rank without a launcher"],
)
def test_what_the_job_has_not_ends_it(script: str, reason: str, message: str, tmp_path: Path) -> None:
    with run(tmp_path, script) as job:
        assert job.exit_code() != 0, job.text
    assert f"({reason})" in job.text, job.text
    assert message in job.text, job.text
    assert "0 restarts" in job.text, job.text
    assert lines(job, "on") == [], job.text


@pytest.mark.parametrize(
    "script",
    [
        f"python -c '{GROUP}; print(1)' | sed s/1/one/; torchrun rank.py two",
        "[ -e x ] && torchrun rank.py one; echo one; echo two",
    ],
    ids=["a rank first", "no launcher"],
)
def test_a_command_that_comes_to_no_launcher_first_runs_once_for_each_rank(script: str, tmp_path: Path) -> None:
    with run(tmp_path, script) as job:
        assert job.exit_code() == 0, job.text
    assert len(lines(job, "one")) == 2, job.text
    assert len(lines(job, "two")) == 2, job.text
    assert "it runs once for each rank" in job.text


def test_a_command_that_ends_before_its_launcher_fails(tmp_path: Path) -> None:
    with run(tmp_path, f"torchrun stays.py & {UNTIL_STAYS}; rm stays-*", max_restarts=0) as job:
        assert job.exit_code() == 1, job.text
    assert "CommandEndedError: the command has ended before the ranks of its launcher" in job.text


def test_the_command_gets_the_signal_that_ends_the_job(tmp_path: Path) -> None:
    with run(tmp_path, "trap 'echo trapped; exit 0' TERM; torchrun stays.py", stopGraceSeconds=20) as job:
        for _ in range(2):
            job.wait_for("rank . of 2")
        job.signal(15)
        job.exit_code()
    assert lines(job, "trapped") == ["trapped"], job.text

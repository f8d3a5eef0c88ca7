"""`spec.rendezvous.backend: c10d`: the command is a stock torchrun that uses the job's store."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.worker_environment import NAME_LOOKUPS
from elasticjob._runtime.system.code_root import CODE_ROOT
from support.common.torchrun import WORKER, script
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
MODULE = [sys.executable, "-m", "torch.distributed.run"]
SPEC: dict[str, Any] = {"rendezvous": {"backend": "c10d"}, "preload": ["torch", "torch._dynamo"], "nprocPerNode": 2}
HELLO = """
import os
print(f"hello from {os.environ['RANK']} {mark}\\n", end="")
"""
"""One write for the whole line: torchrun's workers are not buffered, and share a pipe."""
MARK = "import sys\nmark = 'forked' if 'torch' in sys.modules else 'not forked'\n"


def wait_for_training(run: LocalRun, world: int, ranks: int) -> dict[str, int]:
    """Wait until that many ranks train in a world of that size. Return their process ids by rank."""
    found: dict[str, int] = {}
    while len(found) < ranks:
        match = run.wait_for(rf"trains (\d+) {world} \d+ \d+ (\d+)", timeout=120)
        found[match[1]] = int(match[2])
    return found


def test_a_worker_of_a_stock_torchrun_is_killed_and_the_job_recovers_each_time(tmp_path: Path) -> None:
    job = manifest([TORCHRUN, *script(tmp_path)], replicas=2, **SPEC)
    with LocalRun(job, tmp_path) as run:
        for victim in ("0", "3"):
            ranks = wait_for_training(run, 4, 4)
            # A worker is two processes: torchrun's child (a shim), and the fork that acts for it.
            os.kill(ranks[victim] if victim == "0" else torchruns_child(run, victim), signal.SIGKILL)
            run.wait_for(rf"WorkerFailed: rank {victim} died: SIGKILL .*counts as a restart")
        wait_for_training(run, 4, 4)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 2 restarts" in run.text
    assert "by exec" not in run.text


def test_a_lost_node_is_no_restart_and_a_worker_that_raises_is_reported(tmp_path: Path) -> None:
    """The report comes at once, though another worker does not end: torchrun itself waits 30 s for it first."""
    end = """
import signal
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
"""
    (tmp_path / "raises.py").write_text(WORKER + end)
    job = manifest(
        [TORCHRUN, str(tmp_path / "raises.py"), str(tmp_path / "done")],
        elasticPolicy={"minReplicas": 1, "maxReplicas": 2},
        failurePolicy={"maxRestarts": 0},
        **SPEC,
    )
    with LocalRun(job, tmp_path) as run:
        ranks = wait_for_training(run, 4, 4)
        os.kill(parent(ranks["3"]), signal.SIGKILL)
        run.wait_for(r"round 1.0.1 ended: AgentLost: toy-\d-0 lost$")
        run.wait_for("round 1.0.2 runs")
        (tmp_path / "done").touch()
        assert run.exit_code(120) == 1
    assert re.search(r"toy failed: rank 1 died: ValueError: bad batch .*\(exit 1, UserError\)", run.text)
    assert "; 0 restarts" in run.text
    assert "Unable to shutdown process" not in run.text


REPORT = f"""{MARK}{HELLO}
import json, pathlib
report = {{
    "environment": dict(os.environ), "argv": sys.argv, "executable": sys.executable, "path": sys.path,
    "cwd": os.getcwd(), "name": __name__, "file": __file__,
    "through": [s.write_through for s in (sys.stdout, sys.stderr)],
    "stdout": os.readlink("/proc/self/fd/1").rpartition("/")[2].partition(":")[0], "leads": os.getsid(0) == os.getpid(),
}}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(report))
"""
DIFFERENT_EACH_TIME = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "_"}
"""Variables with a different value in each run."""


def set_by_agent(name: str) -> bool:
    """Return whether the agent sets this variable for torchrun."""
    return name.startswith(("ELASTICJOB_", "PET_"))


@pytest.mark.parametrize("way", ["torchrun", pytest.param("module", marks=pytest.mark.deep), "shell"])
def test_torchruns_workers_are_forked_and_otherwise_the_same_as_without_elasticjob(way: str, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    commands = {}
    for name in ("alone", "job"):
        (tmp_path / name).mkdir()
        log = ["--log-dir", str(tmp_path / name / "log"), "--redirects", "3", "--tee", "1"]
        arguments = [*log, "report.py", str(tmp_path / name), "--lr", "1"]
        start = {"torchrun": [TORCHRUN], "module": MODULE, "shell": ["torchrun"]}[way]
        commands[name] = (
            [*start, *arguments] if way != "shell" else ["bash", "-c", f"true && {shlex.join([*start, *arguments])}"]
        )
    env = {"PATH": os.pathsep.join([str(Path(TORCHRUN).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1"}
    variables = {"PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": CODE_ROOT, "RES_OPTIONS": NAME_LOOKUPS}
    assignments = [f"{name}={value}" for name, value in {**env, **variables}.items()]
    subprocess.run(["env", *assignments, *commands["alone"]], check=True, cwd=tmp_path, capture_output=True)
    job: Any = manifest(commands["job"], **SPEC)
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": n, "value": v} for n, v in env.items()]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(100) == 0
    assert [f"hello from {rank} forked" in run.text for rank in (0, 1)] == [True, True], run.text
    for rank in ("0", "1"):
        alone, in_job = (json.loads((tmp_path / name / rank).read_text()) for name in ("alone", "job"))
        before, after = alone.pop("environment"), in_job.pop("environment")
        differ = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
        assert {n: (before.get(n), after.get(n)) for n in differ - DIFFERENT_EACH_TIME if not set_by_agent(n)} == {}
        alone["argv"][1] = in_job["argv"][1]
        assert in_job == alone
        [kept] = (tmp_path / "job" / "log").glob(f"*/attempt_0/{rank}/stdout.log")
        assert kept.read_text() == f"hello from {rank} forked\n"


EXEC_COMMANDS = {
    "an interpreter that the user has chosen": ["bash", "-c", f"PYTHON_EXEC={sys.executable} torchrun report.py"],
    "a variable that libraries read when they are loaded": ["bash", "-c", "OMP_NUM_THREADS=7 torchrun report.py"],
    "flags that torchrun does not pass on": [sys.executable, "-O", *MODULE[1:], "report.py"],
}


@pytest.mark.parametrize("command", EXEC_COMMANDS.values(), ids=EXEC_COMMANDS.keys())
def test_a_process_whose_place_no_fork_can_take_starts_by_exec(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(f"{MARK}\n{HELLO}")
    job: Any = manifest(command, **SPEC)
    path = os.pathsep.join([str(Path(TORCHRUN).parent), os.environ["PATH"]])
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "PATH", "value": path}]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(100) == 0
    assert [f"hello from {rank} not forked" in run.text for rank in (0, 1)] == [True, True], run.text


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def torchruns_child(run: LocalRun, rank: str) -> int:
    """Return the id of the process that torchrun started as the worker of a rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if argv[1:2] == [b"-IS"] and b"RANK=%s" % rank.encode() in environment and _below(run.pid, int(folder.name)):
            found.append(int(folder.name))
    [child] = found
    return child


def _below(root: int, pid: int) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parent(pid)
    return False

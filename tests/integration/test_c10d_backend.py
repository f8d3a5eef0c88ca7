"""`spec.rendezvous.backend: c10d`: the command is a stock torchrun, on the job's store."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob.code_root import CODE_ROOT
from support.local_run import LocalRun, manifest
from support.torchrun import WORKER, script

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
pytest.importorskip("torch")

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
MODULE = [sys.executable, "-m", "torch.distributed.run"]
SPEC: dict[str, Any] = {"rendezvous": {"backend": "c10d"}, "preload": ["torch", "torch._dynamo"], "nprocPerNode": 2}
WORD = """
import os
print(f"a word from {os.environ['RANK']} {mark}\\n", end="")
"""
"""In one write: torchrun's workers are not buffered, and share a pipe."""
MARK = "import sys\nmark = 'warm' if 'torch' in sys.modules else 'cold'\n"


def trains(run: LocalRun, world: int, ranks: int) -> dict[str, int]:
    """Wait until that many ranks train in a world of that size: their process ids."""
    found: dict[str, int] = {}
    while len(found) < ranks:
        match = run.wait_for(rf"trains (\d+) {world} \d+ \d+ (\d+)", timeout=120)
        found[match[1]] = int(match[2])
    return found


def test_a_worker_of_a_stock_torchrun_is_killed_and_the_job_recovers_each_time(tmp_path: Path) -> None:
    job = manifest([TORCHRUN, *script(tmp_path)], replicas=2, **SPEC)
    with LocalRun(job, tmp_path) as run:
        for victim in ("0", "3"):
            ranks = trains(run, 4, 4)
            # A worker is two processes: torchrun's child, and the one that it stands for.
            os.kill(ranks[victim] if victim == "0" else torchruns_child(run, victim), signal.SIGKILL)
            run.wait_for(rf"WorkerFailed: rank {victim} died: SIGKILL .*counts as a restart")
        trains(run, 4, 4)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 2 restarts" in run.text
    assert "by exec" not in run.text


def test_a_lost_node_is_not_counted_and_a_worker_that_raises_is_named(tmp_path: Path) -> None:
    """At once, though another worker does not end: torchrun would wait 30 s for it before it tells."""
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
        ranks = trains(run, 4, 4)
        os.kill(parent(ranks["3"]), signal.SIGKILL)
        run.wait_for(r"round 1.0.1 ended: AgentLost: toy-\d-0 lost$")
        run.wait_for("round 1.0.2 runs")
        (tmp_path / "done").touch()
        assert run.exit_code(120) == 1
    assert "toy failed: rank 1 died: ValueError: bad batch (exit 1, UserError)" in run.text
    assert "; 0 restarts" in run.text
    assert "Unable to shutdown process" not in run.text


SAYS = f"""{MARK}{WORD}
import json, pathlib
what = {{
    "environment": dict(os.environ), "argv": sys.argv, "executable": sys.executable, "path": sys.path,
    "cwd": os.getcwd(), "name": __name__, "file": __file__,
    "through": [s.write_through for s in (sys.stdout, sys.stderr)],
    "stdout": os.readlink("/proc/self/fd/1").rpartition("/")[2].partition(":")[0], "leads": os.getsid(0) == os.getpid(),
}}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(what))
"""
WHERE = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "_"}
"""Other values each time."""


def is_ours(name: str) -> bool:
    """What the agent tells torchrun."""
    return name.startswith(("ELASTICJOB_", "PET_"))


@pytest.mark.parametrize("way", ["torchrun", "module", "shell"])
def test_torchruns_workers_are_warm_and_otherwise_what_they_are_without_us(way: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    commands = {}
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
        log = ["--log-dir", str(tmp_path / name / "log"), "--redirects", "3", "--tee", "1"]
        words = [*log, "says.py", str(tmp_path / name), "--lr", "1"]
        start = {"torchrun": [TORCHRUN], "module": MODULE, "shell": ["torchrun"]}[way]
        commands[name] = (
            [*start, *words] if way != "shell" else ["bash", "-c", f"true && {shlex.join([*start, *words])}"]
        )
    env = {"PATH": os.pathsep.join([str(Path(TORCHRUN).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1"}
    alone = {"PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
    alone |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": CODE_ROOT}
    variables = [f"{name}={value}" for name, value in {**env, **alone}.items()]
    subprocess.run(["env", *variables, *commands["theirs"]], check=True, cwd=tmp_path, capture_output=True)
    job: Any = manifest(commands["ours"], **SPEC)
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": n, "value": v} for n, v in env.items()]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(100) == 0
    assert [f"a word from {rank} warm" in run.text for rank in (0, 1)] == [True, True], run.text
    for rank in ("0", "1"):
        theirs, ours = (json.loads((tmp_path / name / rank).read_text()) for name in ("theirs", "ours"))
        before, after = theirs.pop("environment"), ours.pop("environment")
        differ = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
        assert {n: (before.get(n), after.get(n)) for n in differ - WHERE if not is_ours(n)} == {}
        theirs["argv"][1] = ours["argv"][1]
        assert ours == theirs
        [kept] = (tmp_path / "ours" / "log").glob(f"*/attempt_0/{rank}/stdout.log")
        assert kept.read_text() == f"a word from {rank} warm\n"


OTHERWISE = {
    "an interpreter that the user has chosen": ["bash", "-c", f"PYTHON_EXEC={sys.executable} torchrun says.py"],
    "what libraries read as they are loaded": ["bash", "-c", "OMP_NUM_THREADS=7 torchrun says.py"],
    "flags that torchrun does not pass on": [sys.executable, "-O", *MODULE[1:], "says.py"],
}


@pytest.mark.parametrize("command", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_what_no_fork_can_stand_for_starts_by_exec(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(f"{MARK}\n{WORD}")
    job: Any = manifest(command, **SPEC)
    path = os.pathsep.join([str(Path(TORCHRUN).parent), os.environ["PATH"]])
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "PATH", "value": path}]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(100) == 0
    assert [f"a word from {rank} cold" in run.text for rank in (0, 1)] == [True, True], run.text


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def torchruns_child(run: LocalRun, rank: str) -> int:
    """The process that a torchrun of this run knows as the worker of a rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"-IS"] and b"RANK=%s" % rank.encode() in environment and _below(run.pid, int(folder.name)):
            found.append(int(folder.name))
    [child] = found
    return child


def _below(root: int, pid: int) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parent(pid)
    return False

"""`elasticjob run` with real processes: store, coordinator, agents, workers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.processes import descendants, has_ended
from support.agent.worker_scripts import DDP, script
from support.common.processes import agent_over, child_with, state_of
from support.local.run import LocalRun, manifest

WAIT_FOR_FILE = """
import os, sys, time
print("started", os.environ["RANK"], os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_every_worker_gets_its_ranks_and_the_job_succeeds(tmp_path: Path) -> None:
    show = "import os; print('rank', *(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))"
    with LocalRun(manifest(script(tmp_path, show), replicas=2, nprocPerNode=2), tmp_path) as run:
        assert run.exit_code() == 0
    shown = sorted(re.findall(r"^\[default(\d)\]:rank (.*)$", run.text, re.MULTILINE))
    assert shown == [("0", "0 0 4 0"), ("1", "1 1 4 0"), ("2", "2 0 4 1"), ("3", "3 1 4 1")]


@pytest.mark.parametrize(("nodes", "connects"), [(2, False), (2, True), (1, False)])
def test_workers_that_succeed_without_a_process_group_are_reported(tmp_path: Path, nodes: int, connects: bool) -> None:
    text = """
import os, sys
from datetime import timedelta
from elasticjob.inprocess._stores.socket_store import SocketStore
if sys.argv[1] == "True":
    store = SocketStore.open(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=9))
    store.set("key", "value")
    assert store.get("key") == b"value"
"""
    with LocalRun(manifest([*script(tmp_path, text), str(connects)], replicas=nodes, preload=[]), tmp_path) as run:
        assert run.exit_code() == 0, run.text
    note = "no worker has connected to MASTER_ADDR:MASTER_PORT: unless the script joins its processes in another way"
    assert run.text.count(note) == (nodes > 1 and not connects)


def test_a_script_that_raises_uses_up_the_restarts_and_names_the_cause(tmp_path: Path) -> None:
    raises = WAIT_FOR_FILE + "if os.environ['RANK'] == '1': raise ValueError('bad batch')\n" + "time.sleep(60)"
    job = manifest([*script(tmp_path, raises), "/"], replicas=2, failurePolicy={"maxRestarts": 1})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    cause = r"rank 1 died: ValueError: bad batch \(script.py, line \d+\) \(exit 1, UserError\) on toy-1-0; 1 restart"
    assert re.search(f"toy failed: {cause}", run.text)
    assert "toy-0-0: round 1.0.2 formed" in run.text


FAILS_ONCE = """
import os, pathlib, sys, time
failed = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1" and not failed.exists():
    failed.touch()
    sys.exit(3)
while not failed.exists():
    time.sleep(0.01)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("restarted after", time.time() - failed.stat().st_mtime, flush=True)
"""


def test_the_exception_of_a_deep_traceback_and_one_without_a_text_are_named(tmp_path: Path) -> None:
    deep = """
import os, traceback
code = "def f0():\\n    raise KeyError()\\n"
code += "".join(f"def f{i + 1}():\\n    return [f{i}() for _ in 'x']\\n" for i in range(100))
open("deep.py", "w").write(code)
import sys
sys.path.insert(0, os.getcwd())
import deep
try:
    deep.f100()
except KeyError:
    os.write(2, traceback.format_exc().encode())  # in one write, so that the agent reads it at once
    os._exit(1)
"""
    job = manifest(script(tmp_path, deep), replicas=1, failurePolicy={"maxRestarts": 0})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    assert "rank 0 died: KeyError (deep.py, line 2) (exit 1, UserError)" in run.lines[-1]


def test_a_rule_replaces_the_node_of_the_failed_worker(tmp_path: Path) -> None:
    codes = {"operator": "In", "values": [3]}
    rule = {"name": "machine", "action": "ReplacePodAndAvoidNode", "onExitCodes": codes}
    command = [*script(tmp_path, FAILS_ONCE), str(tmp_path / "failed")]
    job = manifest(command, replicas=2, failurePolicy={"maxRestarts": 1, "rules": [rule]})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert "toy-1-0 ended (exit 143, left); toy-1-1 takes its place" in run.text
    assert "toy-0-1" not in run.text
    assert "toy succeeded; 1 restart" in run.text


def test_a_restart_waits_for_the_backoff(tmp_path: Path) -> None:
    command = [*script(tmp_path, FAILS_ONCE), str(tmp_path / "failed")]
    job = manifest(command, replicas=2, failurePolicy={"maxRestarts": 1, "backoffSeconds": 2})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert "gathering: the next round starts 2 s after the failure (failurePolicy.backoffSeconds)" in run.text
    waited = [float(seconds) for seconds in re.findall(r"restarted after ([\d.]+)", run.text)]
    assert len(waited) == 2
    assert min(waited) >= 2


ABORTS_IN_FINALIZATION = """
import os, sys
class Aborts:
    def __del__(self):
        os.abort()
aborts = Aborts()
print("last line", flush=True)
"""


def test_a_worker_that_dies_after_its_script_has_succeeded_has_not_failed(tmp_path: Path) -> None:
    job = manifest(script(tmp_path, ABORTS_IN_FINALIZATION), preload=["json"], failurePolicy={"maxRestarts": 0})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert "rank 0 succeeded; its process ended by SIGABRT in its clean-up" in run.text


LEAKS_SHARED_MEMORY = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory

def wait_for(what):
    while not os.path.exists(what):
        time.sleep(0.005)

folder, name, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
block = SharedMemory(f"{name}-{restarts}-{rank}", create=True, size=4096)
mine = os.path.join(folder, f"ready-{restarts}-")
open(mine + rank, "w").close()
wait_for(mine + "0")
wait_for(mine + "1")
if restarts == int(sys.argv[3]):
    os._exit(0)
if rank == "0":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.mark.parametrize("restarts", [15, pytest.param(100, marks=pytest.mark.deep)])
@pytest.mark.parametrize("preload", [[], ["json"]], ids=["exec", "fork"])
def test_restarts_in_place_leave_shared_memory_as_it_was(tmp_path: Path, preload: list[str], restarts: int) -> None:
    name = f"elasticjob-test-{os.getpid()}"
    python, path = script(tmp_path, LEAKS_SHARED_MEMORY)
    command = [
        python,
        "-I",
        "-S",
        path,
        str(tmp_path),
        name,
        str(restarts),
    ]  # Python starts fast, and so do its resource trackers
    job = manifest(command, nprocPerNode=2, preload=preload, failurePolicy={"maxRestarts": restarts})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(240) == 0, run.text
    assert f"toy succeeded; {restarts} restarts" in run.text
    assert [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(name)] == []


@pytest.mark.parametrize("preload", [[], ["json"]], ids=["exec", "fork"])
def test_an_interrupt_is_the_exception_of_the_failure(tmp_path: Path, preload: list[str]) -> None:
    job = manifest(
        script(tmp_path, "import os; os.kill(os.getpid(), 2)"), preload=preload, failurePolicy={"maxRestarts": 0}
    )
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    assert "rank 0 died: KeyboardInterrupt" in run.text


def test_the_root_cause_is_found_though_its_process_ends_last(tmp_path: Path) -> None:
    """Rank 1 fails first and takes long to exit; rank 0 sees the broken collective and exits at once."""
    text = """
import atexit, os, sys, time
failed = os.path.join(sys.argv[1], "failed")
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 60)
    atexit.register(lambda: open(failed, "w"))
    raise ValueError("bad batch")
while not os.path.exists(failed):
    time.sleep(0.01)
time.sleep(0.1)
raise RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
"""
    job = manifest(
        [*script(tmp_path, text), str(tmp_path)], replicas=2, preload=["json"], failurePolicy={"maxRestarts": 0}
    )
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    assert "toy failed: rank 1 died: ValueError: bad batch" in run.text


@pytest.mark.torch
@pytest.mark.parametrize(("nodes", "processes"), [(2, 1), (1, 2)])
def test_a_rank_that_ends_early_is_named_though_its_process_exits_later(
    tmp_path: Path, nodes: int, processes: int
) -> None:
    text = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(200):
    if dist.get_rank() == 1 and step == 3:
        dist.destroy_process_group()
        sys.exit(0)
    dist.all_reduce(torch.ones(1))
"""
    job = manifest(
        script(tmp_path, text), replicas=nodes, nprocPerNode=processes, preload=["torch"],
        failurePolicy={"maxRestarts": 0},
    )  # fmt: skip
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code(150) == 1
    assert "(script.py, line 8); rank 1 had already ended with success: all ranks must make the same" in run.text


def test_the_cause_of_a_rank_that_loses_its_peer_is_the_rank_that_ended_early(tmp_path: Path) -> None:
    text = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(1)
raise RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
"""
    job = manifest(script(tmp_path, text), replicas=2, preload=[], failurePolicy={"maxRestarts": 0})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    cause = "Connection closed by peer [127.0.0.1]:1 (script.py, line 6); rank 1 had already ended with success"
    assert cause in next(line for line in run.lines if "toy failed" in line)
    ends = [line for line in run.lines if "done: Failed (MaxRestartsExceeded): " in line]
    assert len(ends) == 2
    assert all(cause in line and "workers failed after 0 of 0 restarts; last failure: " in line for line in ends)


def test_the_cause_is_a_rank_that_needs_longer_to_exit_than_its_peer_to_notice(tmp_path: Path) -> None:
    """Its process was started by exec, and closes its connections long before it ends, as torch's may."""
    text = f"""
import atexit, os, pathlib, time
closed = pathlib.Path({str(tmp_path / "closed")!r})
def clean_up():
    closed.touch()
    time.sleep(60)
if os.environ["RANK"] == "1":
    atexit.register(clean_up)
    raise ValueError("the learning rate is negative")
while not closed.exists():
    time.sleep(0.01)
time.sleep(0.1)
raise RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
"""
    job = manifest(script(tmp_path, text), replicas=2, preload=[], failurePolicy={"maxRestarts": 0})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1
    failed = next(line for line in run.lines if "toy failed" in line)
    assert "rank 1 died: ValueError: the learning rate is negative (script.py, line 9)" in failed


BREAKS_IN_A_FORK = """
import os, sys
if "json" in sys.modules and sys.argv[1] == "fork":  # the fork server has imported it
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
print("cold" if "json" not in sys.modules else "warm", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if sys.argv[1] == "always":
    sys.exit(3)
"""


@pytest.mark.parametrize("shell", [False, True], ids=["python", "in a shell"])
def test_a_script_that_forks_break_starts_cold_before_its_restarts_are_used_up(tmp_path: Path, shell: bool) -> None:
    command = [*script(tmp_path, BREAKS_IN_A_FORK), "fork"]
    command = ["sh", "-c", "; ".join([shlex.join(["python3", *command[1:]]), "exit $?"])] if shell else command
    job = manifest(command, preload=["json"], failurePolicy={"maxRestarts": 2})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert re.findall(r"\]:(cold|warm) (\d)$", run.text, re.MULTILINE) == [("cold", "2")]
    assert "2 starts in a row failed at once in forked workers: the next ones start by exec" in run.text


def test_a_script_that_fails_at_once_either_way_is_forked_again(tmp_path: Path) -> None:
    command = [*script(tmp_path, BREAKS_IN_A_FORK), "always"]
    job = manifest(command, preload=["json"], failurePolicy={"maxRestarts": 4})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 1, run.text
    starts = re.findall(r"\]:(cold|warm) (\d)$", run.text, re.MULTILINE)
    assert starts == [("warm", "0"), ("warm", "1"), ("cold", "2"), ("warm", "3"), ("warm", "4")]


def test_a_worker_killed_restarts_in_place_and_counts_once(tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = manifest([*script(tmp_path, WAIT_FOR_FILE), str(done)], replicas=2, nprocPerNode=2)
    with LocalRun(job, tmp_path) as run:
        os.kill(int(run.wait_for(r"started 2 (\d+)")[1]), signal.SIGKILL)
        run.wait_for("WorkerFailed: rank 2 died: SIGKILL .Killed.*counts as a restart")
        run.wait_for("round 1.0.2 runs: 4 workers on 2 pods")
        done.touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 1 restart" in run.text
    assert "takes its place" not in run.text


def test_a_rank_that_finished_early_runs_again_when_another_fails(tmp_path: Path) -> None:
    early = """
import os, sys
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("ran", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["RANK"] == "1" and first:
    sys.stdin = open(sys.argv[1])  # until the other one has ended
    sys.stdin.read()
    sys.exit(3)
"""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with LocalRun(manifest([*script(tmp_path, early), str(gate)], replicas=2), tmp_path) as run:
        run.wait_for("toy-0-0: all workers of this pod succeeded")
        gate.open("w").close()
        assert run.exit_code() == 0
    assert sorted(re.findall(r"\]:ran (\d \d)$", run.text, re.MULTILINE)) == ["0 0", "0 1", "1 0", "1 1"]


def agent_fails(folder: Path, *pods: str) -> dict[str, object]:
    """Return a job of two nodes, whose agents in these pods exit 1 before they do anything."""
    (folder / "broken").mkdir()
    (folder / "broken" / "sitecustomize.py").write_text(
        f"import os, sys\nif 'agent' in sys.orig_argv and os.environ['ELASTICJOB_POD_NAME'] in {pods}: os._exit(1)\n"
    )
    job = manifest(script(folder, "print('ran')"), replicas=2, failurePolicy={"maxRestarts": 1})
    spec: Any = job["spec"]
    variables = [{"name": "PYTHONPATH", "value": str(folder / "broken")}]
    spec["template"]["spec"]["containers"][0]["env"] = variables
    return job


def test_an_agent_that_fails_before_the_job_has_ended_is_replaced_and_counts_as_a_restart(tmp_path: Path) -> None:
    with LocalRun(agent_fails(tmp_path, "toy-0-0"), tmp_path) as run:
        assert run.exit_code(60) == 0, run.text
    assert "toy-0-0 ended (exit 1, failed); toy-0-1 takes its place" in run.text
    assert "toy succeeded; 1 restart" in run.text


def test_an_agent_that_fails_again_and_again_ends_the_job(tmp_path: Path) -> None:
    with LocalRun(agent_fails(tmp_path, "toy-0-0", "toy-0-1"), tmp_path) as run:
        assert run.exit_code(60) == 1, run.text
    assert "toy failed: toy-0-1 ended (exit 1, failed); 1 restart" in run.text


LEAVES_A_PROCESS = WAIT_FOR_FILE.replace(
    "print(",
    """
import subprocess
child = subprocess.Popen(["sh", "-c", "sleep 1000; true"], start_new_session=True)
print("child", os.environ["RANK"], child.pid, flush=True)
print(""",
    1,
)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files with a short path, as the paths of Unix sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("ends", ["agent", "run"])
def test_a_killed_agent_leaves_no_process_and_no_file_behind(ends: str, tmp_path: Path, scratch: Path) -> None:
    """The workers die with it; what they have started is killed before another node takes its place."""
    job = manifest([*script(tmp_path, LEAVES_A_PROCESS), str(tmp_path / "done")], replicas=1)
    with LocalRun(job, tmp_path, within=["env", f"TMPDIR={scratch}"]) as run:
        child = int(run.wait_for(r"child 0 (\d+)")[1])
        agent = agent_over(int(run.wait_for(r"started 0 (\d+)")[1]))
        sleeping = [pid for pid in descendants(child) if state_of(pid) == "S"]
        if ends == "run":
            run.signal(signal.SIGINT)
            run.wait_for("interrupted")
            run.signal(signal.SIGINT)
            assert run.exit_code() == 130
        else:
            os.kill(agent, signal.SIGKILL)
            run.wait_for("toy-0-0 ended .SIGKILL.; toy-0-1 takes its place")
        assert not [pid for pid in (child, *sleeping) if not has_ended(pid)]
        if ends == "agent":
            (tmp_path / "done").touch()
            assert run.exit_code() == 0
        assert not any(scratch.iterdir())


def test_a_killed_run_leaves_no_process_and_no_file_behind(tmp_path: Path, scratch: Path) -> None:
    """The kernel ends agents, store and workers with it; what the workers have started is killed by the guardian."""
    job = manifest([*script(tmp_path, LEAVES_A_PROCESS), str(tmp_path / "done")], replicas=2)
    with LocalRun(job, tmp_path, within=["env", f"TMPDIR={scratch}"]) as run:
        children = [int(run.wait_for(r"child \d (\d+)")[1]) for _ in range(2)]
        before = descendants(run.pid)
        assert before.issuperset(children)
        run.signal(signal.SIGKILL)
        assert run.exit_code() == -signal.SIGKILL  # with all output: nothing that has its pipe is left
        deadline = time.monotonic() + 30
        while any(scratch.iterdir()) or not all(has_ended(pid) for pid in before):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_store_that_ends_again_and_again_is_started_ever_later(tmp_path: Path) -> None:
    job = manifest([*script(tmp_path, WAIT_FOR_FILE), str(tmp_path / "done")], replicas=1)
    with LocalRun(job, tmp_path) as run:
        run.wait_for("runs: 1 worker")
        os.kill(child_with("store"), signal.SIGKILL)
        first = run.wait_for(r"the store ended .SIGKILL.; starting it again( in 0.5 s)?$")
        for delay in ("1", "2") if first[1] else ("0.5", "1"):
            kill_store_when_started()
            run.wait_for(rf"the store ended .SIGKILL.; starting it again in {delay} s$")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0


def kill_store_when_started() -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            os.kill(child_with("store"), signal.SIGKILL)
        except (AssertionError, ProcessLookupError):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def test_a_drained_node_leaves_and_is_replaced_without_counting_a_restart(tmp_path: Path) -> None:
    done = tmp_path / "done"
    agent = WAIT_FOR_FILE.replace("os.getpid()", "os.getppid()")
    job = manifest(
        [*script(tmp_path, agent), str(done)], replicas=3, elasticPolicy={"minReplicas": 2, "maxReplicas": 3}
    )
    with LocalRun(job, tmp_path) as run:
        started = [run.wait_for(r"started (\d) (\d+)") for _ in range(3)]
        os.kill(next(int(m[2]) for m in started if m[1] == "2"), signal.SIGTERM)
        run.wait_for("leaving: SIGTERM")
        run.wait_for(r"toy-2-0: done: Left")
        run.wait_for(r"round 1.0.\d runs: 3 workers on 3 pods")
        done.touch()
        assert run.exit_code() == 0
    assert "exit 143, left" in run.text
    assert "toy succeeded; 0 restarts" in run.text


def test_a_spare_takes_the_place_of_a_lost_node_in_one_round(tmp_path: Path) -> None:
    done = tmp_path / "done"
    agent = WAIT_FOR_FILE.replace("os.getpid()", "os.getppid()")
    policy = {"minReplicas": 2, "maxReplicas": 3, "spares": 1}
    with LocalRun(manifest([*script(tmp_path, agent), str(done)], replicas=3, elasticPolicy=policy), tmp_path) as run:
        started = [run.wait_for(r"started (\d) (\d+)") for _ in range(3)]
        members = set(re.findall(r"toy-(\d)-0: round 1.0.1 formed", run.text))
        (spare,) = {"0", "1", "2", "3"} - members
        while not re.search(rf"toy-{spare}-0: workers start by exec", run.text):
            run.wait_for("")
        os.kill(next(int(m[2]) for m in started if m[1] == "1"), signal.SIGKILL)
        run.wait_for("round 1.0.2 runs: 3 workers on 3 pods")
        run.wait_for(r"toy-\d-1: waiting: the round is full without this pod")
        done.touch()
        assert run.exit_code() == 0
    assert f"toy-{spare}-0: round 1.0.2 formed" in run.text
    assert "round 1.0.3" not in run.text
    assert "toy succeeded; 0 restarts" in run.text


def test_an_interrupt_drains_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with LocalRun(manifest([*script(tmp_path, WAIT_FOR_FILE), "never"], replicas=2), tmp_path) as run:
        pids = [int(run.wait_for(r"started \d (\d+)")[1]) for _ in range(2)]
        run.signal(signal.SIGINT)
        assert run.exit_code() == 130
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert run.text.count("done: Left") == 2


def test_a_program_that_vanishes_fails_the_job(tmp_path: Path) -> None:
    """As in a pod whose image lacks it: `elasticjob run` looks for it only once."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nrm {program}\nexit 1\n")
    program.chmod(0o755)
    with LocalRun(manifest([str(program)], replicas=1, failurePolicy={"maxRestarts": 1}), tmp_path) as run:
        assert run.exit_code() == 1
    assert re.search("toy failed: .*program.*StartError", run.text)
    assert re.search("done: Failed .* rank 0 in toy-0-0 failed: StartError: .*program: .*No such file", run.text)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["no-such-program"], "no-such-program: no such program on PATH"),
        (["python3", "nope.py"], r".*/nope.py: no such file"),
        (["python3", "-m", "nope"], r"no module named 'nope', for .*python.* -m nope in .*"),
    ],
    ids=["program", "script", "module"],
)
def test_a_missing_program_is_refused_before_any_node_starts(command: list[str], expected: str, tmp_path: Path) -> None:
    with LocalRun(manifest(command, replicas=2), tmp_path) as run:
        assert run.exit_code() == 64
    (line,) = run.lines
    why = "the job uses this machine's files, and not those of its image"
    assert re.fullmatch(rf"elasticjob run: {expected}; {why} \(the trainer's command: {' '.join(command)}\)", line)


REPORTS_STEPS = """
import os, sys, time
import elasticjob
elasticjob.progress(7, total=9)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_the_lines_about_a_start_say_what_happens(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(12)")
    command = [*script(tmp_path, REPORTS_STEPS), str(tmp_path / "done")]
    job = manifest(command, replicas=1, preload=["slow_import"])
    env = {"name": "PYTHONPATH", "value": str(tmp_path)}
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [env]  # type: ignore[index]
    with LocalRun(job, tmp_path) as run:
        run.wait_for("trains")
        (tmp_path / "done").touch()
        assert run.exit_code() == 0
    lines = [re.sub(r"\d+ s so far", "N s so far", line) for line in run.lines if line.startswith("[job] round")]
    lines = [line for number, line in enumerate(lines) if line not in lines[:number]]
    assert lines == [
        "[job] round 1.0.1: 1 pod imports the modules of spec.preload",
        "[job] round 1.0.1: 1 pod imports the modules of spec.preload, for N s so far",
        "[job] round 1.0.1: the workers of 1 pod start",
        "[job] round 1.0.1 runs: 1 worker on 1 pod",
        "[job] round 1.0.1 trains: step 7 is the first one that was reported",
    ]


def test_one_failure_is_one_line_and_a_healthy_start_has_no_refused_connection(tmp_path: Path) -> None:
    text = "import os, sys; print('bar 10%', file=sys.stderr, flush=True); os._exit(3)"
    with LocalRun(manifest(script(tmp_path, text), failurePolicy={"maxRestarts": 1}), tmp_path) as run:
        assert run.exit_code() == 1
    assert [line for line in run.lines if line.startswith("[job]") and ("died" in line or "ended" in line)] == [
        "[job] round 1.0.1 ended: WorkerFailed: rank 0 died: exit 3: bar 10% (UserError) (counts as a restart)",
        "[job] toy failed: rank 0 died: exit 3: bar 10% (UserError) on toy-0-0; 1 restart (MaxRestartsExceeded)",
    ]
    assert "finished: MaxRestartsExceeded" not in run.text
    assert "cannot connect to the store" not in run.text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python3", "-c", "import sys; print('runs', sys.prefix)"], sys.prefix),
        (["sh", "-c", "exec python3 -c 'import sys; print(\"runs\", sys.prefix)'"], sys.prefix),
        (["{folder}/python3", "train.py"], "{folder}/python3"),
    ],
    ids=["python3", "python3 in a shell", "a path"],
)
def test_python3_is_the_interpreter_of_this_process(
    command: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another python3 comes first on PATH."""
    other = tmp_path / "python3"
    other.write_text(f"#!/bin/sh\necho runs {other}; exit 0\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "train.py").touch()
    with LocalRun(manifest([word.format(folder=tmp_path) for word in command]), tmp_path) as run:
        assert run.exit_code() == 0
    assert re.findall(r"\]:runs (.*)$", run.text, re.MULTILINE) == [expected.format(folder=tmp_path)]


def test_path_in_the_manifest_chooses_python3(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho runs the other one\n")
    other.chmod(0o755)
    (tmp_path / "train.py").touch()
    job = manifest(["python3", "train.py"])
    spec: Any = job["spec"]
    path = {"name": "PATH", "value": f"{tmp_path}:{os.environ['PATH']}"}
    spec["template"]["spec"]["containers"][0]["env"] = [path]
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0
    assert "]:runs the other one" in run.text


def test_an_unknown_field_is_a_usage_error(tmp_path: Path) -> None:
    with LocalRun(manifest(["true"], replica=3), tmp_path) as run:
        assert run.exit_code() == 64
    assert run.lines == ['elasticjob run: unknown field "spec.replica"']


def test_a_bad_manifest_is_a_usage_error(tmp_path: Path) -> None:
    with LocalRun(manifest(["true"], replicas=0), tmp_path) as run:
        assert run.exit_code() == 64
    assert "spec.replicas in body should be greater than or equal to 1" in run.text


@pytest.mark.torch
@pytest.mark.usefixtures("own_threads")
def test_training_survives_the_loss_of_a_worker_an_agent_and_the_store(tmp_path: Path) -> None:
    """One DDP job with an unmodified script and forked workers; after each fault the new world makes steps."""
    done = tmp_path / "done"
    job = manifest(
        [*script(tmp_path, DDP), str(done)],
        replicas=3,
        elasticPolicy={"minReplicas": 2, "maxReplicas": 3},
        preload=["torch", "torch._dynamo"],
    )
    step = r"step 5 rank {} of {} pid (\d+) restart {} "
    with LocalRun(job, tmp_path) as run:
        worker = int(run.wait_for(step.format(1, 3, 0), 120)[1])
        os.kill(worker, signal.SIGKILL)
        worker = int(run.wait_for(step.format(2, 3, 1))[1])

        store = child_with("store")
        os.kill(store, signal.SIGKILL)
        run.wait_for("the store ended .SIGKILL")
        agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        run.wait_for(step.format(1, 2, 1))
        run.wait_for(step.format(2, 3, 1), 120)
        done.touch()
        assert run.exit_code() == 0
    assert "toy succeeded; 1 restart" in run.text
    assert "workers start by exec" not in run.text


GOT = """
import os, signal, sys
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, stop)
print("agent", os.getppid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_an_agent_reaches_its_workers_as_the_same(number: signal.Signals, tmp_path: Path) -> None:
    with LocalRun(manifest(script(tmp_path, GOT)), tmp_path) as run:
        os.kill(int(run.wait_for(r"agent (\d+)")[1]), number)
        run.wait_for(f"got {number.value}$")
        run.wait_for("exit 143, left")
        run.signal(signal.SIGINT)


def test_torchruns_log_options(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys; print('hello'); print('x' * 9, file=sys.stderr); sys.stderr.write('half')")[1]
    options = ["--log-dir", str(tmp_path / "logs"), "--redirects", "0:2", "-t", "1:1", "--local-ranks-filter=1"]
    template = ["--log-line-prefix-template", "${role_name}/${local_rank}: ", "--role", "trainer"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *template, path]
    with LocalRun(manifest(command, nprocPerNode=2), tmp_path) as run:
        assert run.exit_code() == 0
    kept = {str(p.relative_to(tmp_path / "logs")): p.read_text() for p in (tmp_path / "logs").rglob("*.log")}
    assert kept == {"toy-0-0/1.0.1/0/stderr.log": "xxxxxxxxx\nhalf", "toy-0-0/1.0.1/1/stdout.log": "hello\n"}
    assert sorted(line for line in run.lines if "trainer/" in line) == [
        "trainer/1: half",
        "trainer/1: hello",
        "trainer/1: xxxxxxxxx",
    ]


def test_torchs_events_with_the_console_handler(tmp_path: Path) -> None:
    path = script(tmp_path, "print('hello')")[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--event-log-handler", "console", path]
    with LocalRun(manifest(command), tmp_path) as run:
        assert run.exit_code() == 0
    events = re.findall(r'"name": "(torchelastic.worker.status.\w+)", "source": "(\w+)"', run.text)
    assert events == [("torchelastic.worker.status.SUCCEEDED", source) for source in ("WORKER", "AGENT")]

"""An error in any callback or effect ends its process, and the job goes on without it or says why it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import yaml

from elasticjob._runtime.agent.processes import has_ended
from elasticjob._runtime.agent.state_machine import effects
from elasticjob._runtime.system.code_root import CODE_ROOT
from support.agent.lone_agent import OWN_COORDINATOR, lone_agent_environment
from support.agent.worker_scripts import script
from support.common.child_process import ChildProcess
from support.common.injected_errors import called, injecting
from support.local.run import PROGRAM, manifest

STEPS = f"""
import os, sys, time
sys.path.insert(0, {CODE_ROOT!r})
import elasticjob
step = 0
elasticjob.progress(step)  # it connects to the agent
print("started", os.environ["RANK"], os.getpid(), os.getppid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
    elasticjob.progress(step := step + 1)
"""

OF_AGENT = (
    "_runtime.agent.runner.Agent._reap",
    "_runtime.agent.reporting.worker_output.OutputSink._written",
    "_runtime.control_link.frames.FrameProtocol.connection_made",
)
"""Callbacks of an agent whose worker is killed, and that gets SIGTERM after that."""
MORE_OF_AGENT = (
    "_runtime.agent.monitoring.node.node_health.NodeHealth.find_problem.<locals>.check.<locals>.<lambda>",
    "_runtime.agent.monitoring.node.reachability.ReachabilityMonitor._check",
    "_runtime.agent.monitoring.progress.worker_progress.WorkerProgress._accept",
    "_runtime.agent.monitoring.progress.worker_progress.WorkerProgress._disconnect",
    "_runtime.agent.monitoring.progress.worker_progress.WorkerProgress.handshake",
    "_runtime.agent.reporting.state_saver._in_thread.<locals>.finish",
    "_runtime.agent.reporting.worker_output.WorkerPipe._readable",
    "_runtime.agent.runner.Agent._leave",
)
OF_STORE = (
    "_runtime.store.client_connection.ClientConnection._link_ended",
    "_runtime.store.client_connection.ClientConnection.connection_made",
    "_runtime.store_pod.coordinator.Coordinator.report_again",
    "_runtime.store_pod.coordinator.Coordinator._run",
    "_runtime.store_pod.coordinator.Coordinator._tick",
)
NOT_NEEDED = (
    "_runtime.store_pod.main.serve_store.<locals>.end",
    "_runtime.system.loop_errors._raise_error",
    "_runtime.control_link.time_limit._abandon.<locals>.ended",
)
"""Callbacks of the store's end, of a task that has failed, and of an attempt to connect that came too late."""


def start(role: str, target: str, folder: Path) -> ChildProcess:
    command = [*script(folder, STEPS), str(folder / "stop")]
    delayed = {"backoffSeconds": 1}  # the store waits for a moment, not only for messages
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest(command, replicas=2, failurePolicy=delayed)))
    return ChildProcess([*PROGRAM, "run", "job.yaml"], cwd=folder, env=injecting(role, target, folder))


def disturb(run: ChildProcess, ended: str) -> str:
    """Kill a worker of node 1, then let its agent leave. Return the line like `ended`, for which this waits."""
    for signalled, number in (1, signal.SIGKILL), (2, signal.SIGTERM):
        match = run.wait_for(rf"{ended}|started 1 (\d+) (\d+)")
        if not match[signalled]:
            return match.string
        with suppress(ProcessLookupError):  # the error that was put in has ended it
            os.kill(int(match[signalled]), number)
    return run.wait_for(ended).string


@pytest.mark.parametrize("name", [*OF_AGENT, *(pytest.param(name, marks=pytest.mark.deep) for name in MORE_OF_AGENT)])
def test_an_agent_whose_callback_fails_is_replaced_and_the_job_succeeds(name: str, tmp_path: Path) -> None:
    with start("agent", f"elasticjob.{name}", tmp_path) as run:
        disturb(run, r"toy-1-0 ended \(exit 70")
        (tmp_path / "stop").touch()
        assert run.exit_code() == 0
    assert f"RuntimeError: injected into elasticjob.{name}" in run.text
    assert "injected" in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", OF_STORE)
def test_a_store_whose_callback_fails_starts_again_and_the_job_succeeds(name: str, tmp_path: Path) -> None:
    with start("store", f"elasticjob.{name}", tmp_path) as run:
        line = disturb(run, r"the store ended \(exit 70")
        (tmp_path / "stop").touch()
        # Without a report of its own the store was never of use, and the run shows its log.
        assert run.exit_code() == (0 if "starting it again" in line else 1)
    assert "starting it again" in run.text or f"injected into elasticjob.{name}" in run.text


def test_a_run_whose_callback_fails_ends_its_nodes_and_says_why(tmp_path: Path) -> None:
    with start("run", "elasticjob._runtime.local.local_run.LocalRun._interrupt", tmp_path) as run:
        run.wait_for("started 1")
        run.process.send_signal(signal.SIGINT)
        assert run.exit_code() == 1
    assert "toy failed: internal error: RuntimeError: injected into" in run.text
    assert "in once" in run.text  # the traceback


def test_every_callback_that_is_called_has_its_test(tmp_path: Path) -> None:
    known = {f"elasticjob.{name}" for name in (*OF_AGENT, *MORE_OF_AGENT, *OF_STORE, *NOT_NEEDED)}
    for role in ("agent", "store"):
        folder = tmp_path / role
        folder.mkdir()
        with start(role, "", folder) as run:
            disturb(run, "toy-1-1 takes its place")
            (folder / "stop").touch()
            assert run.exit_code() == 0
        assert {name for name in called(folder) if "." in name} <= known


ONE_ROUND = f"""{OWN_COORDINATOR}
import asyncio, sys
from dataclasses import replace
from elasticjob._runtime.agent.state_machine import decide as machine, effects, events
from elasticjob._runtime.agent.main import main
from elasticjob._runtime.contract.names import ExitCode

target, command = sys.argv[1], sys.argv[2:]
round_id = RoundId(1, 0, 1)
start = messages.StartRound(round_id, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 3)
leave = messages.Finish(messages.Outcome.LEFT, "NodeLeft")
launched = asyncio.Event()
decide, create_workers = machine.decide, runner.WorkerGroup

def watch_launch(state, event):
    if isinstance(event, events.WorkersLaunched):
        launched.set()
    return decide(state, event)

def keep_workers(*args):
    global workers
    workers = create_workers(*args)
    return workers

machine.decide, runner.WorkerGroup = watch_launch, keep_workers
"""

BREAK_AN_EFFECT = (
    ONE_ROUND
    + """
arguments = {
    "Send": (messages.WorkersStarted(round_id),), "LaunchWorkers": (start,), "PrestartWorkers": (start,),
    "HoldWorkers": (round_id,), "StopWorkersAt": (round_id, 3), "StopWorkers": (0.0,), "DumpStacks": (round_id,),
    "AdmitWorkers": (start,), "BreakCollectivesOfWorkers": (), "EndLaunchers": (1,),
    "CheckHealth": (), "FreezeWorkers": (True,), "StartLeaveTimer": (1.0,), "SetNodeEnd": (None,), "Log": ("",),
    "Exit": (ExitCode.SUCCEEDED, messages.Termination(messages.Outcome.SUCCEEDED, "")),
}
effect = getattr(effects, target)(*arguments[target])
execute = runner.Agent.execute

def decide_to_fail(state, event):
    fails = event == events.Received(leave)
    return replace(decide(state, event), state=state, effects=(effect,)) if fails else watch_launch(state, event)

def fail(self, wanted):
    if wanted is effect and target == "FreezeWorkers":
        execute(self, wanted)
    elif wanted is effect and target in ("LaunchWorkers", "PrestartWorkers"):
        workers.expect_start()
    if wanted is effect:
        raise ConnectionResetError("this effect fails")  # an error that callers expect of connections
    execute(self, wanted)

async def coordinate(send):
    send(start)
    await launched.wait()
    asyncio.get_running_loop().call_soon(send, leave)  # from a callback, as a timer does
    await asyncio.Event().wait()

machine.decide, runner.Agent.execute = decide_to_fail, fail
sys.exit(main(command))
"""
)

SUCCEEDS_AND_BREAKS = (
    ONE_ROUND
    + """
async def coordinate(send):
    send(start)
    await launched.wait()
    finish_log_files = workers.finish_log_files

    async def fail_and_finish():
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        await finish_log_files()

    workers.finish_log_files = fail_and_finish
    send(leave)
    await asyncio.Event().wait()

def fail():
    raise RuntimeError("broken at the end")

sys.exit(main(command))
"""
)

WRITES = """
import os, sys, time
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    time.sleep(1)
"""


def run_agent(program: str, target: str, log: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", program, target, *command]
    return subprocess.run(
        argv, env=lone_agent_environment(log), capture_output=True, text=True, timeout=60, check=False
    )


def test_an_error_in_the_clean_up_changes_no_outcome(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    done = run_agent(SUCCEEDS_AND_BREAKS, "Log", log, [*script(tmp_path, WRITES), str(tmp_path / "pid")])
    assert "RuntimeError: broken at the end" in done.stderr
    assert (done.returncode, json.loads(log.read_text())["outcome"]) == (143, "Left"), done.stderr


@pytest.mark.parametrize("effect", [kind.__name__ for kind in get_args(effects.Effect)])
def test_an_agent_whose_effect_fails_ends_and_leaves_no_worker(effect: str, tmp_path: Path) -> None:
    log, pid = tmp_path / "termination", tmp_path / "pid"
    done = run_agent(BREAK_AN_EFFECT, effect, log, [*script(tmp_path, WRITES), str(pid)])
    assert done.returncode == 70, done.stderr
    assert "in fail\n" in done.stderr  # the traceback
    termination = json.loads(log.read_text())
    assert (termination["outcome"], termination["reason"]) == ("Error", "AgentBroke")
    assert termination["message"] == "ConnectionResetError: this effect fails"
    assert not pid.exists() or has_ended(int(pid.read_text()))

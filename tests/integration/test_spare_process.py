"""`restartable(spare_process=True)`: another process of a rank waits at the function until the rank's own one ends."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agent.worker_scripts import script
from support.common.processes import agent_over, stayed
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

TRAINS = """
import os, sys, time
import torch
import torch.distributed as dist
import elasticjob

folder = sys.argv[1]
print("sets up pid", os.getpid(), "local rank", os.environ["LOCAL_RANK"], "round", os.environ["ELASTICJOB_ROUND"],
      flush=True)
BEFORE_THE_FUNCTION
state = None if MADE_INSIDE else elasticjob.State(model=torch.nn.Linear(4, 4), step=0)

@elasticjob.restartable(spare_process=True)
def train():
    global state
    dist.init_process_group("gloo")
    print("called pid", os.getpid(), flush=True)
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.01)
    state = state or elasticjob.State(model=torch.nn.Linear(4, 4), step=0)
    state.sync()
    print(f"begins at {state.step} rank {dist.get_rank()} pid {os.getpid()} of {dist.get_world_size()} "
          f"seed {torch.initial_seed()}", flush=True)
    done = torch.zeros(1)
    while not done.item():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()
        state.step += 1
        if dist.get_rank() == 0:
            done.fill_(float(os.path.exists(os.path.join(folder, "done"))))
        dist.broadcast(done, 0)
        elasticjob.progress(state.step)
        time.sleep(0.03)
    dist.destroy_process_group()

train()
"""
READS_CHECKPOINT = 'torch.manual_seed(int(open(folder + "/checkpoint").read()))'
BEGINS = r"begins at (\d+) rank (\d) pid (\d+) of"
SPARE = r"process (\d+) waits at its function, as the spare of local rank (\d)"


def start(
    folder: Path, before_the_function: str = "", *, nodes: int = 2, workers: int = 1, made_inside: bool = False
) -> LocalRun:
    source = TRAINS.replace("BEFORE_THE_FUNCTION", before_the_function).replace("MADE_INSIDE", str(made_inside))
    command = [*script(folder, source), str(folder)]
    return LocalRun(manifest(command, replicas=nodes, nprocPerNode=workers, preload=["torch"]), folder)


def begun(run: LocalRun, count: int) -> dict[int, int]:
    """Wait until so many ranks have begun a round, and return their processes."""
    found = [run.wait_for(BEGINS).groups() for _ in range(count)]
    return {int(rank): int(pid) for _, rank, pid in found}


def spares(run: LocalRun, count: int) -> dict[int, int]:
    """Wait until so many spare processes are at their function; return them by the agent that has started each."""
    pids = [int(run.wait_for(SPARE)[1]) for _ in range(count)]
    return {agent_over(pid): pid for pid in pids}


def ends(pid: int) -> bool:
    """Wait until a process has ended, for 10 s at most; return whether it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10.0)[0])
    finally:
        os.close(descriptor)


def test_a_spare_process_takes_the_place_of_a_killed_one_and_is_replaced(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        first = begun(run, 2)
        waiting = spares(run, 2)
        for _ in range(2):
            agent = agent_over(first[1])
            os.kill(first[1], signal.SIGKILL)
            again = begun(run, 2)
            assert stayed(first[0], again[0], run.text), "the other rank's process stays"
            assert again[1] == waiting[agent]
            waiting |= spares(run, len(set(again.values()) - set(first.values())))
            first = again
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert not [pid for pid in waiting.values() if Path(f"/proc/{pid}").exists()]
    steps = [int(step) for step, _, _ in re.findall(BEGINS, run.text)]
    assert steps[0] == 0
    assert steps == sorted(steps)
    assert steps[-1] > steps[0], "the state is that of the process that stays"


def test_a_spare_process_warms_up_before_its_round(tmp_path: Path) -> None:
    """What its first round and step need once is done by then: it has formed a group, and reduced gradients."""
    hook = "torch.nn.modules.module.register_module_forward_pre_hook"
    prints = 'print("runs a", type(module).__name__, "pid", os.getpid(), "of", dist.get_world_size(), flush=True)'
    with start(tmp_path, f"def note(module, _):\n    {prints}\n{hook}(note)") as run:
        first, waiting = begun(run, 2), spares(run, 2)
        os.kill(first[1], signal.SIGKILL)
        begun(run, 2)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    warmed_up = {int(pid) for pid in re.findall(r"runs a Linear pid (\d+) of 1", run.text)}
    assert warmed_up >= set(waiting.values())
    assert not warmed_up & set(first.values())
    assert "will take longer" not in run.text


def test_each_local_rank_has_one_and_a_lost_one_is_replaced(tmp_path: Path) -> None:
    with start(tmp_path, nodes=1, workers=2) as run:
        first = begun(run, 2)
        by_rank = {int(rank): int(pid) for pid, rank in (run.wait_for(SPARE).groups() for _ in range(2))}
        assert sorted(by_rank) == [0, 1]
        os.kill(by_rank[0], signal.SIGKILL)
        run.wait_for(r"the spare process of local rank 0 ended \(SIGKILL.*\): the next round starts another one")
        os.kill(first[1], signal.SIGKILL)
        again = begun(run, 2)
        assert again == {0: first[0], 1: by_rank[1]}
        by_rank = {int(rank): int(pid) for pid, rank in (run.wait_for(SPARE).groups() for _ in range(2))}
        os.kill(again[0], signal.SIGKILL)
        assert begun(run, 2) == {0: by_rank[0], 1: again[1]}
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text


def test_a_script_that_cannot_run_outside_of_a_round_gets_no_spare_process(tmp_path: Path) -> None:
    with start(tmp_path, 'print("store at", os.environ["MASTER_ADDR"], flush=True)') as run:
        first = begun(run, 2)
        for _ in range(2):
            run.wait_for(r"the spare process of local rank 0 ended \(exit code 1\): no other one starts")
        os.kill(first[1], signal.SIGKILL)
        again = begun(run, 2)
        assert stayed(first[0], again[0], run.text)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert len(re.findall(r"sets up pid \d+ local rank 0 round 0\.0\.", run.text)) == 2


def test_a_spare_process_that_is_not_at_its_function_does_not_delay_the_new_one(tmp_path: Path) -> None:
    """It waits for a lock that the lost process held. It ends with what it has started."""
    helper = (
        'import subprocess; print("helper", subprocess.Popen(["sleep", "1000"]).pid,'
        ' "of pid", os.getpid(), "round", os.environ["ELASTICJOB_ROUND"], flush=True)'
    )
    lock = 'import fcntl; lock = open(folder + "/lock" + os.environ["RANK"], "w"); fcntl.flock(lock, fcntl.LOCK_EX)'
    never_there = 'while os.environ["ELASTICJOB_ROUND"].startswith("0.0."): time.sleep(0.02)'
    with start(tmp_path, f"{helper}; {lock}\n{never_there}") as run:
        first = begun(run, 2)
        waiting, helpers = {}, {}
        for _ in range(2):
            child, pid = map(int, run.wait_for(r"helper (\d+) of pid (\d+) round 0\.0\.1").groups())
            waiting[agent_over(pid)], helpers[agent_over(pid)] = pid, child
        agent = agent_over(first[1])
        os.kill(first[1], signal.SIGKILL)
        again = begun(run, 2)
        assert stayed(first[0], again[0], run.text)
        assert again[1] not in waiting.values()
        assert ends(helpers.pop(agent))
        assert all(Path(f"/proc/{pid}").exists() for pid in helpers.values()), "the other node's spare process stays"
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text


@contextmanager
def old_checkpoint(folder: Path, *, made_inside: bool, restarts: int = 1) -> Iterator[tuple[LocalRun, dict[int, int]]]:
    """Yield a run and its processes by rank; the script reads a checkpoint before its function, and it is old by now.

    In the end, no spare process that has read it may be called, and none of the processes be left.
    """
    (folder / "checkpoint").write_text("1")
    with start(folder, READS_CHECKPOINT, made_inside=made_inside) as run:
        first = begun(run, 2)
        waiting = spares(run, 2)
        (folder / "checkpoint").write_text("2")
        yield run, first
        replaced = [run.wait_for(r"process (\d+) of local rank 0 may have read an old one")[1] for _ in range(2)]
        assert {*map(int, replaced)} == {*waiting.values()}
        again = begun(run, 2)
        assert not set(again.values()) & {*first.values(), *waiting.values()}
        (folder / "done").touch()
        assert run.exit_code() == 0, run.text
    assert re.findall(r"begins at .* seed (\d)$", run.text, re.MULTILINE) == ["1", "1", "2", "2"]
    assert f"toy succeeded; {restarts} restart" in run.text


@pytest.mark.parametrize("made_inside", [pytest.param(False, marks=pytest.mark.deep), True])
def test_spare_processes_do_not_bring_back_an_old_checkpoint(made_inside: bool, tmp_path: Path) -> None:
    """All processes of the round are lost."""
    with old_checkpoint(tmp_path, made_inside=made_inside) as (_, first):
        agents = [agent_over(pid) for pid in first.values()]
        for agent in agents:  # no agent may interrupt its process before it is killed
            os.kill(agent, signal.SIGSTOP)
        for pid in first.values():
            os.kill(pid, signal.SIGKILL)
        for agent in agents:
            os.kill(agent, signal.SIGCONT)


def test_nor_if_the_last_process_with_the_state_is_lost_while_it_waits_for_the_next_round(tmp_path: Path) -> None:
    with old_checkpoint(tmp_path, made_inside=True) as (run, first):
        agent = agent_over(first[0])
        os.kill(agent, signal.SIGSTOP)  # the next round waits for this node
        os.kill(first[0], signal.SIGKILL)
        while runs(first[1]):
            pass
        os.kill(first[1], signal.SIGKILL)
        run.wait_for("toy-1-0: the training state of this pod ended with its process")
        os.kill(agent, signal.SIGCONT)


def test_nor_if_it_is_lost_before_a_spare_process_that_was_called_has_received_the_state(tmp_path: Path) -> None:
    with old_checkpoint(tmp_path, made_inside=False, restarts=2) as (run, first):
        (tmp_path / "hold").touch()
        os.kill(first[1], signal.SIGKILL)
        called = {int(run.wait_for(r"called pid (\d+)")[1]) for _ in range(2)}
        assert called & {*first.values()} == {first[0]}
        os.kill(first[0], signal.SIGKILL)
        (tmp_path / "hold").unlink()


def runs(pid: int) -> bool:
    """Return whether the main thread of a process has run in half a second: a function with the above loop does."""
    before = Path(f"/proc/{pid}/status").read_text()
    time.sleep(0.5)
    return before.splitlines()[-2:] != Path(f"/proc/{pid}/status").read_text().splitlines()[-2:]


def test_a_spare_process_is_killed_first_without_memory_until_it_trains(tmp_path: Path) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with start(tmp_path) as run:
        first = begun(run, 2)
        own, waiting = score(first[1]), spares(run, 2)
        assert [score(pid) for pid in waiting.values()] == [1000, 1000]
        os.kill(first[1], signal.SIGKILL)
        assert score(begun(run, 2)[1]) == own
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text


REPORTS_NO_STEPS = """
import os, sys, time
import torch.distributed as dist
import elasticjob

@elasticjob.restartable(spare_process=True)
def train():
    dist.init_process_group("gloo")
    print(f"begins at 0 rank {dist.get_rank()} pid {os.getpid()} of {dist.get_world_size()}", flush=True)
    while not os.path.exists(sys.argv[1] + "/done"):
        dist.barrier()
        time.sleep(0.01)

train()
dist.destroy_process_group()
"""


def test_a_script_that_reports_no_steps_gets_one_after_a_time(tmp_path: Path) -> None:
    command = [*script(tmp_path, REPORTS_NO_STEPS), str(tmp_path)]
    with LocalRun(manifest(command, replicas=2, preload=["torch"]), tmp_path) as run:
        first = begun(run, 2)
        run.wait_for(r"spare processes of local ranks 0 start once .* or have been in their function for 10 s")
        waiting = spares(run, 2)
        agent = agent_over(first[1])
        os.kill(first[1], signal.SIGKILL)
        assert begun(run, 2)[1] == waiting[agent]
        assert f"process {waiting[agent]}, the spare of local rank 0, takes its place" in run.text
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text

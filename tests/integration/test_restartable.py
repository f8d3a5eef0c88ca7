"""`@elasticjob.restartable` under real agents: which processes survive which fault, and what the script sees."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.common.processes import agent_over, ended_for_gloo, stayed
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch

TRAINS = """
import atexit, ctypes, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elasticjob

folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
calls = step = 0

def requested(what):
    try:
        os.unlink(os.path.join(folder, f"{what}-{dist.get_rank()}"))
    except FileNotFoundError:
        return False
    print("requested", what, flush=True)
    return True

@elasticjob.restartable
def train(argument):
    global calls, step
    calls += 1
    dist.init_process_group("gloo")
    pairs = dist.new_group(range(dist.get_world_size()))
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    agreed = torch.tensor([step])
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=pairs)
    begin = step = int(agreed)
    stop = torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        inputs = torch.full((4, 10), float(rank + 1))
        ddp(inputs).sum().backward()
        expected = 4 * sum(range(1, world + 1)) / world
        assert abs(model.weight.grad.mean().item() - expected) < 1e-3, "wrong gradient"
        optimizer.step()
        step += 1
        if step == begin + 3:
            round_id = os.environ["ELASTICJOB_ROUND"]
            print(f"round {round_id} rank {rank} of {world} pid {os.getpid()} call {calls} {argument} from {begin}\\n",
                  end="", flush=True)
        if rank == 0:
            stop.fill_(float(os.path.exists(os.path.join(folder, "done"))))
        dist.broadcast(stop, 0)
        if requested("raise"):
            raise ValueError("bad batch")
        if requested("hang"):
            time.sleep(10_000)
        if requested("hold"):
            ctypes.PyDLL(None).sleep(10_000)
        elasticjob.progress(step)
        time.sleep(0.03)
    dist.destroy_process_group()
    return step

def leave():
    print(f"atexit {os.environ['RANK']}", flush=True)

atexit.register(leave)
print("returned", train("argument") > 0, flush=True)
"""


class Training:
    """A run of the script, with what it printed."""

    def __init__(self, run: LocalRun, folder: Path) -> None:
        self.run = run
        self._folder = folder

    def processes(self, world: int) -> dict[int, tuple[int, int]]:
        """Return (process id, number of the call) by rank of the next round with this world size."""
        line = rf"round (\S+) rank (\d+) of {world} pid (\d+) call (\d+) argument"
        found: dict[int, tuple[int, int]] = {}
        first = None
        while len(found) < world:
            match = self.run.wait_for(line)
            if first != match[1]:
                first, found = match[1], {}
            found[int(match[2])] = (int(match[3]), int(match[4]))
        return found

    def request(self, what: str, rank: int | None = None) -> None:
        (self._folder / (what if rank is None else f"{what}-{rank}")).touch()


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Training]:
    spec = {"failurePolicy": {"maxRestarts": 5}, "preload": ["torch", "torch._dynamo"], **request.param}
    job = manifest([*script(tmp_path, TRAINS), str(tmp_path)], replicas=3, **spec)
    with LocalRun(job, tmp_path) as run:
        yield Training(run, tmp_path)


def after(before: dict[int, tuple[int, int]], output: str, *replaced: int) -> dict[int, object]:
    """Return the processes of the next round: all call the function once more; `replaced` ranks are new processes, and
    those of which the output says that gloo has lost their operation."""
    ended = ended_for_gloo(output)
    return {
        rank: "new" if rank in replaced or pid in ended else (pid, call + 1) for rank, (pid, call) in before.items()
    }


def calls(found: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Return the number of the call by process: ranks change when nodes come and go."""
    return dict(found.values())


def stays(found: dict[int, tuple[int, int]], *left: int, output: str) -> dict[int, int]:
    """Return the calls in the next round of the processes that stay when the ranks `left` do not."""
    ended = ended_for_gloo(output)
    return {pid: call + 1 for rank, (pid, call) in found.items() if rank not in left and pid not in ended}


def compare(found: dict[int, tuple[int, int]], before: dict[int, tuple[int, int]]) -> dict[int, object]:
    """Return the processes of a round, "new" for those that were not there `before` and call the function first."""
    old = {pid for pid, _ in before.values()}
    return {rank: "new" if pid not in old and call == 1 else (pid, call) for rank, (pid, call) in found.items()}


@pytest.mark.parametrize(
    "training", [{"elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}, "stopGraceSeconds": 5}], indirect=True
)
def test_processes_survive_what_they_can(training: Training) -> None:
    run, ranks = training.run, training.processes(3)

    training.request("raise", 2)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text), "a rank that raises is called again too"
    ranks = found

    os.kill(ranks[1][0], signal.SIGKILL)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text, 1)
    ranks = found

    training.request("hold", 0)  # rank 0 holds the interpreter for ever, and no interruption reaches it
    run.wait_for("requested hold")
    os.kill(ranks[1][0], signal.SIGKILL)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text, 0, 1), "what does not leave its function is replaced"
    ranks = found

    os.kill(ranks[0][0], signal.SIGSTOP)  # silent: only the break of their connections ends the others' wait for it
    os.kill(ranks[1][0], signal.SIGKILL)
    run.wait_for("toy-0-0: round .* ends")
    os.kill(ranks[0][0], signal.SIGCONT)
    assert compare(training.processes(3), ranks) == after(ranks, run.text, 1)

    training.request("done")
    assert run.exit_code() == 0, run.text
    assert re.findall(r"\]:(returned True)$", run.text, re.MULTILINE) == ["returned True"] * 3
    assert sorted(re.findall(r"atexit (\d)", run.text)) == ["0", "1", "2"]
    assert "toy succeeded; 4 restarts" in run.text
    assert "wrong gradient" not in run.text


@pytest.mark.parametrize("training", [{"elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}}], indirect=True)
def test_a_node_is_lost_and_replaced(training: Training) -> None:
    """The others lose the step in progress when it goes, and none when its replacement joins."""
    run, ranks = training.run, training.processes(3)
    agent = int(Path(f"/proc/{ranks[1][0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    two = training.processes(2)
    assert calls(two).items() >= stays(ranks, 1, output=run.text).items()
    three = training.processes(3)
    assert calls(three).items() > stays(two, output=run.text).items()
    training.request("done")
    assert run.exit_code() == 0, run.text
    assert "toy succeeded; 0 restarts" in run.text
    last = int(re.findall(r"ends after step (\d+)", run.text)[-1])
    begins = [int(step) for step in re.findall(r"of 3 pid \d+ call \d+ argument from (\d+)", run.text)[-3:]]
    assert begins == [last] * 3, "the round begins where the last one ended"


@pytest.mark.parametrize(
    "training", [{"hangPolicy": {"progressTimeoutSeconds": 10}, "stopGraceSeconds": 600}], indirect=True
)
def test_a_hanging_rank_is_interrupted_and_one_that_was_stopped_is_killed_at_once(training: Training) -> None:
    run, ranks = training.run, training.processes(3)
    training.request("hang", 1)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text)
    ranks = found

    os.kill(ranks[1][0], signal.SIGSTOP)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text, 1)
    training.request("done")
    assert run.exit_code() == 0, run.text


@pytest.mark.parametrize("training", [{"failurePolicy": {"maxRestarts": 0}, "stopGraceSeconds": 30}], indirect=True)
def test_the_exception_reaches_the_script_when_no_round_follows(training: Training) -> None:
    run = training.run
    training.processes(3)
    training.request("raise", 1)
    assert run.exit_code() == 1
    assert re.search(r"toy failed: rank 1 died: ValueError: bad batch .*\(exit 1, UserError\) on toy-1-0", run.text)
    assert sorted(re.findall(r"atexit (\d)", run.text)) == ["0", "1", "2"]
    assert "]:returned" not in run.text


@pytest.mark.parametrize(
    "training", [{"elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}, "stopGraceSeconds": 0}], indirect=True
)
def test_processes_stay_without_a_grace_too(training: Training) -> None:
    """`stopGraceSeconds` is for processes that get SIGTERM. These are interrupted."""
    run, ranks = training.run, training.processes(3)
    os.kill(ranks[1][0], signal.SIGKILL)
    found = training.processes(3)
    assert compare(found, ranks) == after(ranks, run.text, 1)
    ranks = found
    os.kill(agent_over(ranks[1][0]), signal.SIGTERM)  # a planned end, and another one when its replacement joins
    two = training.processes(2)
    assert calls(two) == stays(ranks, 1, output="")
    assert calls(training.processes(3)).items() > stays(two, output="").items()
    training.request("done")
    assert run.exit_code() == 0, run.text
    last = int(re.findall(r"ends after step (\d+)", run.text)[-1])
    begins = re.findall(r"of 3 pid \d+ call \d+ argument from (\d+)", run.text)[-3:]
    assert [int(step) for step in begins] == [last] * 3


def test_a_function_below_a_shell_restarts_by_new_processes(tmp_path: Path) -> None:
    """The agent does not know when the shell is done, so it stops the shell like any worker."""
    _, path = script(tmp_path, TRAINS)
    job = manifest(["bash", "-c", f"python {path} {tmp_path} && echo after"], replicas=2, preload=["torch"])
    spec: Any = job["spec"]
    variables = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    spec["template"]["spec"]["containers"][0]["env"] = [{"name": k, "value": v} for k, v in variables.items()]
    with LocalRun(job, tmp_path) as run:
        training = Training(run, tmp_path)
        ranks = training.processes(2)
        os.kill(ranks[1][0], signal.SIGKILL)
        found = training.processes(2)
        assert compare(found, ranks) == {0: "new", 1: "new"}
        training.request("raise", 0)
        assert compare(training.processes(2), found) == {0: "new", 1: "new"}
        training.request("done")
        assert run.exit_code() == 0, run.text
    assert run.text.count("]:after") == 2
    assert "toy succeeded; 2 restarts" in run.text


EXAMPLE = Path(__file__).parents[2] / "examples/restartable/train.py"


def losses(text: str) -> list[tuple[int, str]]:
    """Return (step, bits of the loss) of each line of rank 0, in this order."""
    return [(int(step), loss) for step, loss in re.findall(r"step=(\d+) loss=(\S+) world=3 rank=0", text)]


@pytest.mark.deep
def test_the_example_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The same bits as in a run without a fault, though a worker is killed, a node is drained and a rank 0 is killed.

    A DDP object that looks for unused parameters keeps the order in which it adds up gradients. Others change it
    after their first step.
    """
    source = EXAMPLE.read_text().replace(
        "DistributedDataParallel(network)", "DistributedDataParallel(network, find_unused_parameters=True)"
    )
    source = source.replace("loss={loss.item():.6f}", "loss={loss.item().hex()}")
    assert source.count("find_unused_parameters") == source.count(".hex()") == 1
    command = [*script(tmp_path, source), "--steps=120", "--step-delay=0.02"]
    spec: dict[str, Any] = {"replicas": 3, "preload": ["torch", "torch._dynamo"]}
    with LocalRun(manifest(command, **spec), tmp_path) as run:
        assert run.exit_code() == 0, run.text
        expected = losses(run.text)
    assert [step for step, _ in expected] == list(range(1, 121))
    with LocalRun(manifest(command, **spec), tmp_path) as run:
        survivor = run.wait_for(r"step=20 .* rank=0 pid=(\d+)")[1]
        os.kill(int(run.wait_for(r"step=30 .* rank=2 pid=(\d+)")[1]), signal.SIGKILL)
        os.kill(agent_over(int(run.wait_for(r"step=60 .* rank=1 pid=(\d+)")[1])), signal.SIGTERM)
        at_80 = int(run.wait_for(r"step=80 .* rank=0 pid=(\d+)")[1])
        assert stayed(int(survivor), at_80, run.text)
        os.kill(at_80, signal.SIGKILL)
        assert run.exit_code() == 0, run.text
    found = losses(run.text)
    assert set(found) <= set(expected)
    # Each end of a round may come between a step and its line. A later loss depends on all steps before.
    missing = sorted(set(expected) - set(found))
    assert expected[-1] in found
    assert len(missing) <= 3, missing
    assert len(found) <= len(expected) + 1, "only the step in progress of a killed rank 0 may be done again"


def ranks_and_pids(run: LocalRun, line: str, count: int) -> dict[str, str]:
    """Return process ids by rank from so many lines."""
    found = [run.wait_for(line) for _ in range(count)]
    return {match[1]: match[2] for match in found}


FORMS_TWICE = """
import os, sys, time
import torch.distributed as dist
import elasticjob

folder, rank = sys.argv[1], os.environ["RANK"]
killed = os.path.join(folder, "killed")
calls = 0

@elasticjob.restartable
def train():
    global calls
    calls += 1
    print(f"rank {rank} pid {os.getpid()} call {calls}", flush=True)
    if rank == "1" and os.path.exists(killed):  # the others wait for it in init_process_group
        os.unlink(killed)
        raise ValueError("second failure")
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"rank {rank} formed", flush=True)
    while not os.path.exists(os.path.join(folder, "done")):  # in no collective: gloo cannot lose its operation
        time.sleep(0.01)
    dist.barrier()

train()
dist.destroy_process_group()
"""


def test_a_failure_while_the_others_form_their_group(tmp_path: Path) -> None:
    """A wait in the store ends too: the processes that wait there are interrupted, not killed."""
    command = [*script(tmp_path, FORMS_TWICE), str(tmp_path)]
    job = manifest(command, replicas=3, preload=["torch"], stopGraceSeconds=30)  # a name may take seconds to resolve
    with LocalRun(job, tmp_path) as run:
        pids = ranks_and_pids(run, r"rank (\d) pid (\d+) call 1", 3)
        for _ in range(3):
            run.wait_for("formed")
        (tmp_path / "killed").touch()
        os.kill(int(pids["1"]), signal.SIGKILL)
        for _ in range(3):
            run.wait_for("formed")
        (tmp_path / "done").touch()
        run.wait_for("toy (succeeded|failed)")
    third_call = set(re.findall(r"rank [02] pid (\d+) call 3", run.text))
    assert third_call == {pids["0"], pids["2"]}, run.text


ENDS_WHILE_SENDING = """
import fcntl, os, signal, socket, struct, termios, threading, time
import torch
import torch.distributed as dist
import elasticjob

calls, state = 0, elasticjob.State(model=torch.nn.Linear(4, 4), step=0)

def end_while_sending():
    while True:
        for name in os.listdir("/proc/self/fd"):
            try:
                if struct.unpack("i", fcntl.ioctl(int(name), termios.TIOCOUTQ, bytes(4)))[0] > 1 << 14:
                    os.kill(os.getpid(), signal.SIGKILL)
            except OSError:
                pass

@elasticjob.restartable
def train():
    global calls
    calls += 1
    dist.init_process_group("gloo")
    state.sync()
    rank, large = dist.get_rank(), torch.ones(1 << 26)
    print(f"rank {rank} call {calls} begins at {state.step}", flush=True)
    for _ in range(3):
        dist.barrier()
        state.step += 1
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
        threading.Thread(target=end_while_sending, daemon=True).start()
    dist.broadcast(large, 1)
    dist.barrier()

train()
dist.destroy_process_group()
"""


def test_a_process_whose_collective_gloo_has_lost_is_replaced_at_once(tmp_path: Path) -> None:
    """Not after `stopGraceSeconds`: the interruption cannot reach it. Its node keeps its state, the only one."""
    command = script(tmp_path, ENDS_WHILE_SENDING)
    with LocalRun(manifest(command, replicas=2, preload=["torch"], stopGraceSeconds=600), tmp_path) as run:
        assert run.exit_code() == 0, run.text
    begins = [(0, 1, 0), (1, 1, 0), (0, 1, 3), (1, 1, 3)]
    found = re.findall(r"rank (\d) call (\d) begins at (\d)", run.text)
    assert sorted(tuple(map(int, each)) for each in found) == sorted(begins), run.text
    assert len(ended_for_gloo(run.text)) == 1
    assert "toy succeeded; 1 restart" in run.text


GROUPS_THAT_DO_NOT_END = """
import os, sys, time
import torch.distributed as dist
import elasticjob
from elasticjob.inprocess._restartable import restartable

folder, calls = sys.argv[1], 0

def hang():
    while True:
        time.sleep(1)

@elasticjob.restartable
def train():
    global calls
    calls += 1
    dist.init_process_group("gloo")
    if dist.get_rank() == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        restartable.collect_garbage = hang
    dist.barrier()
    print(f"rank {dist.get_rank()} pid {os.getpid()} call {calls}", flush=True)
    while not os.path.exists(os.path.join(folder, "done")):
        time.sleep(0.01)

train()
dist.destroy_process_group()
"""


def test_a_process_whose_groups_do_not_end_is_replaced(tmp_path: Path) -> None:
    """It has left its function, and gets more time than `stopGraceSeconds`, but not for ever."""
    command = [*script(tmp_path, GROUPS_THAT_DO_NOT_END), str(tmp_path)]
    with LocalRun(manifest(command, replicas=3, preload=["torch"], stopGraceSeconds=1), tmp_path) as run:
        pids = ranks_and_pids(run, r"rank (\d) pid (\d+) call 1", 3)
        os.kill(int(pids["1"]), signal.SIGKILL)
        found = ranks_and_pids(run, r"rank (\d) pid (\d+) call \d", 3)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0, run.text
    assert {rank for rank in found if found[rank] == pids[rank]} == {"0"}
    assert "toy succeeded; 1 restart" in run.text


PLANNED_THEN_FAILS = """
import os, sys, time
import torch.distributed as dist
import elasticjob

folder, calls, step = sys.argv[1], 0, 0

@elasticjob.restartable
def train():
    global calls, step
    calls += 1
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    print(f"rank {os.environ['RANK']} of {world} call {calls} pid {os.getpid()}", flush=True)
    while calls < 3 and not os.path.exists(os.path.join(folder, "done")):
        dist.barrier()
        step += 1
        elasticjob.progress(step)
        time.sleep(0.01)

train()
dist.destroy_process_group()
raise ValueError("after the function")
"""


def test_a_script_that_fails_after_a_planned_end_has_failed(tmp_path: Path) -> None:
    """What ended a process at a planned end must not end it with success later."""
    spec: dict[str, Any] = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2}, "failurePolicy": {"maxRestarts": 0}}
    job = manifest([*script(tmp_path, PLANNED_THEN_FAILS), str(tmp_path)], replicas=2, preload=["torch"], **spec)
    with LocalRun(job, tmp_path) as run:
        first = ranks_and_pids(run, r"rank (\d) of 2 call 1 pid (\d+)", 2)
        agent = int(Path(f"/proc/{first['1']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)  # one node trains on, and the planned end comes when the other is back
        run.wait_for(r"of 1 call 2")
        assert run.exit_code() == 1, run.text
    assert "after the function" in run.text

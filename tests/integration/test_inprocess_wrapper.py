"""`elasticjob.inprocess.Wrapper` with real processes and gloo, without an agent of ours."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import elasticjob
from support.common.child_process import ChildProcess
from support.local.run import LocalRun, manifest
from support.training.wrapper_ranks import PRELUDE, Ranks, start_ranks, trains

pytestmark = pytest.mark.torch
pytest.importorskip("torch.distributed")

RESTART = """
from elasticjob.inprocess._threads.interruption import Interrupter

def saying(base, name, result=lambda state, *args: None):
    class Saying(base):
        def __call__(self, state, *args):
            say("hook", name)
            return result(state, *args)
    return Saying()

shift, two = ShiftRanks(), MaxActiveWorldSize(2)

def interrupts():
    # The monitor thread interrupts the function, or would without the atomic section.
    monitor = next(thread.ident for thread in threading.enumerate() if thread.name == "elasticjob-monitor")
    return sys._current_frames()[monitor].f_code is Interrupter.interrupt.__code__

@Wrapper(
    initialize=saying(Initialize, "initialize"),
    abort=compose(saying(Abort, "abort"), AbortTorchDistributed()),
    finalize=saying(Finalize, "finalize"),
    completion=saying(Completion, "completion"),
    health_check=saying(HealthCheck, "health"),
    rank_assignment=saying(RankAssignment, "assignment", shift),
    rank_filter=saying(RankFilter, "filter", two),
)
def train(call: CallWrapper, *, value):
    rank = join(call)
    say("hook", "function")
    if call.iteration == 0 and rank == 0:
        with call.atomic(), call.atomic():
            wait_in_collective()  # rank 1 raises after this
            while not interrupts():
                time.sleep(0.01)
            say("atomic section is over")
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            say("swallowed", type(error).__name__)
        while True:
            time.sleep(0.01)
    if call.iteration == 0:
        wait_in_collective()
        raise ValueError("planned")
    dist.barrier()
    dist.destroy_process_group()
    return value + rank

before = os.environ["MASTER_PORT"]
say("returned", train(None, value=10), train.__name__)
assert os.environ["MASTER_PORT"] == before
say("then", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "called again", Wrapper()(lambda: 7)())
"""


def test_an_exception_restarts_all_ranks_in_their_processes(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, RESTART, 3) as (first, second, spare):
        for iteration in (0, 1):
            trains(first, 0, 2, iteration)
            trains(second, 1, 2, iteration)
        assert [process.exit_code() for process in (first, second, spare)] == [0, 0, 0]
        assert first.wait_for("returned (.*)")[1] == "10 train"
        assert second.wait_for("returned (.*)")[1] == "11 train"
        assert spare.wait_for("returned (.*)")[1] == "None train"
        assert "ValueError: planned" in second.text
        for rank, process in enumerate((first, second, spare)):
            process.wait_for(f"then {rank} of 3 called again 7")

    start = ["assignment", "filter", "initialize", "health"]
    fault = ["abort", "finalize", "health"]
    once = [*start, "function", *fault, *start, "function", "completion"]
    assert re.findall("^hook (.*)", second.text, re.MULTILINE) == once
    assert re.findall("^hook (.*)", spare.text, re.MULTILINE) == [name for name in once if name != "function"]
    # The abort waited for the atomic section, and the exception that the function swallowed was raised again.
    assert re.findall("^(hook abort|atomic section|swallowed \\w+)", first.text, re.MULTILINE) == [
        "atomic section", "hook abort", "swallowed RankShouldRestart",
    ]  # fmt: skip


KILLED = """
@Wrapper(finalize=SayRecords(), last_call_wait=timedelta(0))
def train(call: "CallWrapper | None" = None):
    rank = join(call)
    if dist.get_world_size() > 1:
        wait_in_collective() if rank else time.sleep(1000)
    return rank

say("returned", train())
"""


def test_ranks_that_are_killed_are_left_out_also_the_one_that_started_the_store(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, KILLED, 3) as (first, second, third):
        for rank, process in enumerate((first, second, third)):
            trains(process, rank, 3, 0)
        second.process.kill()
        first.wait_for("records .*1:TERMINATED")
        trains(first, 0, 2, 1)
        trains(third, 1, 2, 1)
        first.process.kill()
        trains(third, 0, 1, 2)
        assert third.exit_code() == 0
        assert third.wait_for("returned (.*)")[1] == "0"


JOINS = """
@Wrapper()
def train(call: CallWrapper):
    if call.iteration == 0 and os.environ["RANK"] == "1":
        while not call.state.store.exists(["joins"]):
            time.sleep(0.01)
        raise ValueError("planned")
    call.state.store.set("joins", "1")
    rank = join(call)  # in iteration 0, this waits for rank 1
    return rank

train(None)
"""


def test_a_rank_that_waits_in_init_process_group_is_interrupted_too(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, JOINS, 2) as (first, second):
        trains(first, 0, 2, 1)
        trains(second, 1, 2, 1)
        assert [first.exit_code(), second.exit_code()] == [0, 0]


LEAVES = """
class Leave(Terminate):
    def __call__(self, state):
        while not os.path.exists(FOLDER + "/left"):
            time.sleep(0.01)
        say("left at", time.monotonic())

class Completed(Completion):
    def __call__(self, state):
        say("completed in", state.iteration)

@Wrapper(terminate=Leave(), completion=Completed(), finalize=SayRecords(), rank_filter=ActiveWorldSizeDivisibleBy(2))
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0 and rank == 1:
        while not call.state.store.exists(["returns"]):
            time.sleep(0.01)
        sys.exit(3)
    if call.iteration == 0:
        call.state.store.set("returns", "1")
        return rank
    dist.all_reduce(torch.ones(1))
    return rank

say("returned", train(call=None), "at", time.monotonic())
"""


SPARE = """
@Wrapper(rank_filter=MaxActiveWorldSize(1), **seconds(
    soft_timeout=1.5, hard_timeout=40, monitor_thread_interval=0.1, progress_watchdog_interval=0.1))
def train(call: CallWrapper):
    say("iteration", call.iteration)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        call.ping()
        time.sleep(0.05)

train()
say("done")
"""


def test_a_spare_pings_while_it_waits_longer_than_the_soft_timeout(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, SPARE, 2) as (active, spare):
        assert [process.exit_code() for process in (active, spare)] == [0, 0]
    assert re.findall("^iteration .*|^done", active.text, re.MULTILINE) == ["iteration 0", "done"]
    assert re.findall("^iteration .*|^done", spare.text, re.MULTILINE) == ["done"]


def test_a_base_exception_ends_its_rank_and_a_spare_takes_its_place(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, LEAVES, 3) as (first, second, spare):
        trains(second, 1, 2, 0)
        first.wait_for("records 1:BASE_EXCEPTION")
        trains(first, 0, 2, 1)
        trains(spare, 1, 2, 1)
        assert spare.wait_for("returned (.*) at")[1] == "1"
        first.wait_for("completed in 1")  # and not in the iteration in which only its own function had returned
        (tmp_path / "left").touch()
        left = float(second.wait_for("left at (.*)")[1])
        assert second.exit_code() == 3
        # The rank that started the store returned after all others had left.
        assert float(first.wait_for("returned 0 at (.*)")[1]) > left
        assert first.exit_code() == 0
        assert re.findall("^completed in (.*)", first.text, re.MULTILINE) == ["1"]


SOFT = """
@Wrapper(finalize=SayRecords(), **seconds(
    soft_timeout=1.5, hard_timeout=40, monitor_thread_interval=0.1, progress_watchdog_interval=0.1))
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0:
        if rank == 1:
            call.ping()  # from now on, other progress does not count
        while True:
            time.sleep(0.01)
    return rank

say("returned", train(None))
"""


def test_a_rank_that_stops_to_ping_causes_a_restart(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, SOFT, 2) as processes:
        for rank, process in enumerate(processes):
            trains(process, rank, 2, 0)
            process.wait_for("records 1:SOFT_TIMEOUT$")
            trains(process, rank, 2, 1)
            assert process.exit_code() == 0


HARD = """
@Wrapper(
    finalize=SayRecords(), monitor_process_logfile=FOLDER + "/monitor-{rank}.log",
    **seconds(soft_timeout=1.5, hard_timeout=3, termination_grace_time=GRACE, monitor_process_interval=0.1,
              progress_watchdog_interval=0.1))
def train(call: CallWrapper):
    rank = join(call)
    if rank == 1:
        hang()
    while call.iteration == 0 or rank == 1:
        time.sleep(0.01)
    return rank

say("returned", train(None))
"""

HOLDS_THE_GIL = """
GRACE = 0.1

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(1000)  # no thread of this process runs
"""

STOPS_ITSELF = """
GRACE = 5

def hang():
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_blocking(1, False)
    signal.set_wakeup_fd(1)  # in C: the interruption of the function may come before the first line of a handler
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_holds_the_gil_is_killed_by_its_monitor_process(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, HOLDS_THE_GIL + HARD, 2) as (first, second):
        trains(second, 1, 2, 0)
        first.wait_for("records 1:HARD_TIMEOUT$")
        trains(first, 0, 1, 1)
        assert first.exit_code() == 0
        assert second.exit_code() == -signal.SIGKILL
    assert "made no progress for 3 s" in (tmp_path / "monitor-1.log").read_text()


def test_a_stopped_process_continues_to_handle_sigterm_and_is_killed_after_the_grace_time(
    ranks: Ranks, tmp_path: Path
) -> None:
    with ranks(tmp_path, STOPS_ITSELF + HARD, 2) as (first, second):
        trains(second, 1, 2, 0)
        first.wait_for("records 1:HARD_TIMEOUT$")
        first.wait_for(r"trains 0 of 1 iteration \d ")  # the other one may have gone on in its grace time
        assert first.exit_code() == 0
        assert second.exit_code() == -signal.SIGKILL
        assert second.text.count(chr(signal.SIGTERM)) == 1


LOST = """
@Wrapper(finalize=SayRecords(), **seconds(heartbeat_interval=0.1, heartbeat_timeout=2, monitor_process_interval=0.1))
def train(call: CallWrapper):
    rank = join(call)
    say("monitor", monitor_process(call).pid)
    if call.iteration == 0:
        while True:
            time.sleep(0.01)
    return rank

say("returned", train(None))
"""


@pytest.mark.parametrize(
    ("number", "record"),
    [
        pytest.param(signal.SIGKILL, "TERMINATED", id="the store sees their connections close"),
        pytest.param(signal.SIGSTOP, "UNRESPONSIVE", id="another monitor misses the heartbeats"),
    ],
)
def test_a_rank_that_is_lost_with_its_monitor_process_is_noticed(
    ranks: Ranks, number: signal.Signals, record: str, tmp_path: Path
) -> None:
    with ranks(tmp_path, LOST, 2) as (first, second):
        lost = int(second.wait_for("monitor (.*)")[1]), second.process.pid
        try:
            for pid in lost:
                os.kill(pid, number)
            first.wait_for(f"records 1:{record}$")
            trains(first, 0, 1, 1)
            # Its monitor process has its output and the store until the lost rank's connections close.
            assert first.process.wait(60) == 0
        finally:
            for pid in lost:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


FILE_STORE = """
import os
import torch.distributed as dist
from elasticjob.inprocess import PrefixStore, StoreMixin

class FileStore(dist.FileStore, StoreMixin):
    critical_ranks = frozenset()

    def __init__(self, path):
        dist.FileStore.__init__(self, path)

    def with_prefix(self, prefix):
        return PrefixStore(prefix, self)
"""
OTHER_STORE = """
from file_store import FileStore

@Wrapper(store_factory=FileStore, store_kwargs={"path": FOLDER + "/store"}, finalize=SayRecords())
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0:
        while True:
            time.sleep(0.01)
    return rank

say("returned", train(None))
"""


def test_another_store_serves_ranks_and_their_monitor_processes(tmp_path: Path) -> None:
    """Here `python` starts each rank, as for users: the ranks of the other tests are forks."""
    (tmp_path / "file_store.py").write_text(FILE_STORE)
    with start_ranks(tmp_path, OTHER_STORE, 2) as (first, second):
        trains(second, 1, 2, 0)
        second.process.kill()
        first.wait_for("records 1:TERMINATED$")
        trains(first, 0, 1, 1)
        assert first.exit_code() == 0


NEXT_PORT_IS_IN_USE = """
import contextlib, socket

if os.environ["RANK"] == "0":
    with contextlib.suppress(OSError):  # already in use
        other = socket.create_server(("", int(os.environ["MASTER_PORT"]) + 1))
"""


def test_it_runs_under_a_stock_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + NEXT_PORT_IS_IN_USE + RESTART)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environ = {**os.environ, "PYTHONPATH": str(Path(elasticjob.__file__).parents[1])}
    with ChildProcess([*command, str(tmp_path / "script.py"), str(tmp_path)], env=environ) as torchrun:
        assert torchrun.exit_code() == 0, torchrun.text
        assert sorted(re.findall("^returned (.*) train", torchrun.text, re.MULTILINE)) == ["10", "11", "None"]
    assert "the wrapper's store is unavailable" not in torchrun.text


EXAMPLE = Path(__file__).parents[2] / "examples/wrapper/train.py"
START = 240.0
"""Seconds for the imports of torch in many processes on a busy machine."""


def repeats_the_steps_since_the_checkpoint(output: str) -> None:
    """Assert that the example went back to step 10, with the same losses as before."""
    found = re.findall(r"step=(\d+) loss=(\S+) world=3 iteration=(\d) pid=(\d+)", output)
    first, second = ([(int(step), loss) for step, loss, number, _ in found if number == each] for each in "01")
    # On a busy machine rank 0 may be interrupted after step 14 before it has printed it.
    assert [step for step, _ in first] in (list(range(1, 14)), list(range(1, 15)))
    assert [step for step, _ in second] == list(range(11, 31))
    assert first[10:] == second[: len(first) - 10], "the steps that are repeated have the same losses"
    assert len({pid for *_, pid in found}) == 1, "the process of rank 0 goes on"
    assert output.count("20 steps in the last iteration") == 3


def test_the_example_goes_on_from_its_checkpoint_in_the_same_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(EXAMPLE)]
    environ = {**os.environ, "PYTHONPATH": str(Path(elasticjob.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = [f"--path={tmp_path / 'state.pt'}", "--steps=30", "--raise-at=15"]
    with ChildProcess([*command, *options], env=environ) as torchrun:
        assert torchrun.exit_code(START) == 0, torchrun.text
    repeats_the_steps_since_the_checkpoint(torchrun.text)


def test_the_example_calls_its_hooks_on_each_rank_in_the_documented_order() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environ = {**os.environ, "PYTHONPATH": str(Path(elasticjob.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with ChildProcess([*command, str(EXAMPLE.with_name("hooks.py"))], env=environ) as torchrun:
        assert torchrun.exit_code(START) == 0, torchrun.text
    # Rank 0 waits for rank 1: gloo's error, that rank 1 has closed its connections, may come before the interruption.
    waiting = "RuntimeError" if "rank 0 iteration 0: finalize after RuntimeError" in torchrun.text else "NoneType"
    for rank, status, error in ((0, "ACTIVE", waiting), (1, "ACTIVE", "RuntimeError"), (2, "INACTIVE", "NoneType")):
        begin = [f"initialize as {status}", "health check"]
        fault = ["abort", f"finalize after {error}", "health check"]
        expected = [f"0: {line}" for line in (*begin, *fault)] + [f"1: {line}" for line in (*begin, "completion")]
        assert re.findall(rf"^rank {rank} iteration (.*)", torchrun.text, re.MULTILINE) == expected
    assert sorted(re.findall("^returned (.*)", torchrun.text, re.MULTILINE)) == ["10.0", "10.0", "None"]


def test_the_example_runs_in_an_elastic_job_too(tmp_path: Path) -> None:
    """The agents notice nothing: no worker ends, and nothing is charged."""
    options = [f"--path={tmp_path / 'state.pt'}", "--steps=30", "--raise-at=15"]
    with LocalRun(manifest([sys.executable, str(EXAMPLE), *options], replicas=3), tmp_path) as run:
        assert run.exit_code(START) == 0, run.text
    repeats_the_steps_since_the_checkpoint(run.text)
    assert run.lines[-1].endswith("succeeded; 0 restarts")


ALONE = """
import traceback

def run(name, function, **arguments):
    wrapped = Wrapper(**arguments)(function)
    try:
        say(name, "returned", wrapped())
    except BaseException as error:
        say(name, "raised", type(error).__name__, "because of", type(error.__cause__).__name__)

def hook(base, function):
    return type("Hook", (base,), {"__call__": lambda self, state, *args: function(state, *args)})()

def fail(*_):
    raise ValueError("planned")

def once(call: CallWrapper):
    if call.iteration == 0:
        raise ValueError("planned")
    return call.iteration

def other_annotations(a=1, *, call: "Optional[CallWrapper]" = None):
    return call.iteration

from typing import Optional
from elasticjob.inprocess._call import call_wrapper, log_setup

run("string", other_annotations)
run("restart", once)
run("no-abort", once, abort=None)

def asks_for_a_restart(call: CallWrapper):
    if call.iteration == 0:
        raise RankShouldRestart
    return call.iteration
run("asks", asks_for_a_restart, **seconds(soft_timeout=1000, hard_timeout=2000, barrier_timeout=3000))

import gc
gc.disable()
open_files = len(os.listdir("/proc/self/fd"))
run("again", lambda: 1)
say("more descriptors after a call:", len(os.listdir("/proc/self/fd")) - open_files)
gc.enable()
run("abort", once, abort=hook(Abort, fail))
run("finalize", once, finalize=hook(Finalize, fail))
run("health", once, health_check=hook(HealthCheck, lambda state, error: fail() if error else None))
run("health-at-start", lambda: 1, health_check=hook(HealthCheck, fail))
run("assignment", once, rank_assignment=hook(RankAssignment, lambda state, left: (state, {7})))
run("no-place", once, rank_assignment=hook(RankAssignment, lambda state, left: (state.terminate(), left)))
run("initialize", lambda: 1, initialize=compose(RetryController(max_iterations=2), hook(Initialize, fail)))
run("completion", lambda: 1, initialize=RetryController(max_iterations=2), completion=hook(Completion, fail))
run("terminate", sys.exit, terminate=hook(Terminate, fail))

class Silent(call_wrapper.MonitorThread):
    def start(self):
        pass

call_wrapper.MonitorThread, call_wrapper.RESTART_TIMEOUT, real = Silent, 0.1, call_wrapper.MonitorThread
run("no-restart", fail)
call_wrapper.MonitorThread = real

def kill_monitor(call: CallWrapper):
    if call.iteration == 0:
        os.kill(monitor_process(call).pid, signal.SIGKILL)
        while True:
            time.sleep(0.01)
    return monitor_process(call).is_running
run("monitor", kill_monitor, finalize=SayRecords())

def nested():
    return Wrapper()(lambda: 1)()
run("nested", nested, initialize=RetryController(max_iterations=1))

thread = threading.Thread(target=run, args=("thread", lambda: 1))
thread.start()
thread.join()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run("initialized", lambda: 1)
dist.destroy_process_group()

def threads_and_handlers():
    return threading.active_count(), len(log_setup.LOGGER.handlers), signal.getsignal(signal.SIGRTMAX - 3)
say("before a failed construction", *threads_and_handlers())
run("construction", lambda: 1, store_kwargs={"unknown": 1})
say("after a failed construction", *threads_and_handlers())
run("after", lambda: 1)

import inspect

def say_time(name, parameter):
    method = getattr(StoreMixin, name)
    def saying(*arguments, **named):
        given = inspect.signature(method).bind(*arguments, **named).arguments
        say("time of", name, given[parameter].total_seconds())
        return method(*arguments, **named)
    setattr(StoreMixin, name, saying)

for name in ("initial_barrier", "iteration_barrier", "termination_barrier", "completion_barrier"):
    say_time(name, "timeout")
say_time("exclude_terminated_ranks", "last_call_wait")
run("times", once, **seconds(barrier_timeout=130, completion_timeout=7, last_call_wait=3))

os.environ["WORLD_SIZE"] = "2"  # the other rank never comes
intervals = ("monitor_process_interval", "heartbeat_interval", "monitor_thread_interval", "progress_watchdog_interval")
run("barrier-timeout", lambda: 1, **seconds(
    soft_timeout=0.3, hard_timeout=0.4, heartbeat_timeout=0.4, barrier_timeout=0.5, **dict.fromkeys(intervals, 0.1)))
"""


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each scenario of `ALONE` ended with, by name."""
    with ranks(tmp_path_factory.mktemp("alone"), ALONE, 1) as (process,):
        assert process.exit_code() == 0, process.text
    return dict(re.findall("^([a-z-]+) ((?:returned|raised) .*)", process.text, re.MULTILINE)) | {"text": process.text}


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("string", "returned 0"),
        ("restart", "returned 1"),
        ("no-abort", "returned 1"),
        ("abort", "returned 1"),
        ("asks", "returned 1"),
        ("again", "returned 1"),
        ("finalize", "raised ValueError because of NoneType"),
        ("health", "raised HealthCheckError because of ValueError"),
        ("health-at-start", "raised HealthCheckError because of ValueError"),
        ("assignment", "raised RestartError because of NoneType"),
        ("no-place", "raised RestartError because of NoneType"),
        ("initialize", "raised RestartAbort because of NoneType"),
        ("completion", "returned 1"),
        ("terminate", "raised SystemExit because of NoneType"),
        ("no-restart", "raised InternalError because of ValueError"),
        ("monitor", "returned True"),
        ("nested", "raised RestartAbort because of NoneType"),
        ("thread", "raised RuntimeError because of NoneType"),
        ("initialized", "raised ValueError because of NoneType"),
        ("construction", "raised TypeError because of NoneType"),
        ("after", "returned 1"),
        ("times", "returned 1"),
        ("barrier-timeout", "raised BarrierTimeoutError because of NoneType"),
    ],
)
def test_how_a_call_of_a_single_rank_ends(alone: dict[str, str], scenario: str, expected: str) -> None:
    assert alone[scenario].startswith(expected)


def test_the_end_of_a_monitor_process_is_recorded(alone: dict[str, str]) -> None:
    assert "records 0:MONITOR_PROCESS" in alone["text"].splitlines()


def test_a_call_releases_the_connections_of_its_store_without_a_garbage_collection(alone: dict[str, str]) -> None:
    assert "more descriptors after a call: 0" in alone["text"].splitlines()


def test_an_interrupted_construction_leaves_nothing_behind(alone: dict[str, str]) -> None:
    before, after = re.findall("^(?:before|after) a failed construction (.*)", alone["text"], re.MULTILINE)
    assert before == after


def test_the_times_for_which_ranks_wait_are_the_wrappers_arguments(alone: dict[str, str]) -> None:
    *given, missing = re.findall(r"^time of (\w+) ([\d.]+)$", alone["text"], re.MULTILINE)
    assert given == [
        ("initial_barrier", "130.0"),
        ("iteration_barrier", "130.0"),
        ("termination_barrier", "130.0"),
        ("exclude_terminated_ranks", "3.0"),
        ("iteration_barrier", "130.0"),
        ("completion_barrier", "7.0"),
    ]
    assert missing == ("initial_barrier", "0.5")

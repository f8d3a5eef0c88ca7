"""Ranks that leave a call of a `Wrapper` while the others continue, and how long these wait for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest

from elasticjob.inprocess._stores.socket_store import SocketStore
from support.common.ports import free_port
from support.training.wrapper_ranks import Ranks, trains

pytestmark = pytest.mark.torch
pytest.importorskip("torch.distributed")

LONG = timedelta(seconds=60)

END = """
try:
    say("returned", train())
except Exception as error:
    say("raised", type(error).__name__, error, "because of", repr(error.__cause__))
"""

HOOK_FAILS = """
class Fails(KIND):
    def __call__(self, state, exception):
        if state.initial_rank == 1 and exception is not None:
            raise OSError("broken")

@Wrapper(**{ARGUMENT: Fails()}, last_call_wait=timedelta(0))
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0 and rank == 1:
        raise ValueError("planned")
    if call.iteration == 0:
        threading.Event().wait()  # until this rank is interrupted
    return rank
"""


@pytest.mark.parametrize(
    ("kind", "argument", "error"),
    [
        (
            "HealthCheck",
            "health_check",
            r"HealthCheckError the health check of rank 1 failed: broken because of OSError\('broken'\)",
        ),
        ("Finalize", "finalize", "OSError broken because of None"),
    ],
)
def test_a_hook_that_fails_after_a_fault_ends_its_rank_and_the_other_one_continues(
    ranks: Ranks, tmp_path: Path, kind: str, argument: str, error: str
) -> None:
    script = f"KIND, ARGUMENT = {kind}, {argument!r}\n{HOOK_FAILS}{END}"
    with ranks(tmp_path, script, 2) as (healthy, unhealthy):
        trains(unhealthy, 1, 2, 0)
        unhealthy.wait_for(rf"^raised {error}$")
        trains(healthy, 0, 1, 1)
        healthy.wait_for("^returned 0$")
        assert [process.exit_code() for process in (healthy, unhealthy)] == [0, 0]


NEVER_RETURNS = """
@Wrapper(finalize=SayRecords(), completion_timeout=timedelta(seconds=1))
def train(call: CallWrapper):
    if call.iteration == 0 and os.environ["RANK"] == "1":
        threading.Event().wait()  # until this rank is interrupted
    say("completes iteration", call.iteration)
"""


def test_ranks_restart_when_one_does_not_return_within_the_completion_timeout(ranks: Ranks, tmp_path: Path) -> None:
    """The barrier waits in chunks, here of 29.5 s: the time-out ends within one."""
    with ranks(tmp_path, NEVER_RETURNS + END, 2) as (first, second):
        first.wait_for("^completes iteration 0$")
        first.wait_for("BarrierTimeoutError: ranks 1 of 2 did not reach the completion barrier within 1 s", timeout=20)
        for process in (first, second):
            process.wait_for("^records 0:EXCEPTION$")
            process.wait_for(r"^completes iteration [1-9]\d*$")  # on a busy machine a time-out may come again
            process.wait_for("^returned None$")
        assert [process.exit_code() for process in (first, second)] == [0, 0]


KILLED = """
@Wrapper(last_call_wait=timedelta(seconds=4))
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0:
        threading.Event().wait()  # until a rank is killed
    return rank
"""


def test_a_rank_that_ends_within_the_last_call_wait_is_left_out_at_once(ranks: Ranks, tmp_path: Path) -> None:
    port = free_port(following=1)
    with ranks(tmp_path, KILLED + END, 3, MASTER_PORT=str(port)) as (first, second, third):
        for rank, process in enumerate((first, second, third)):
            trains(process, rank, 3, 0)
        third.process.kill()
        with closing(SocketStore.open("127.0.0.1", port + 1, LONG)) as store:
            # All ranks have ended the function: without the wait, the next iteration would begin with two of them.
            assert store.with_prefix("call/0").for_iteration(0).wait_for(["termination/done"], LONG)
        second.process.kill()
        trains(first, 0, 1, 1)
        first.wait_for("^returned 0$")
        assert first.exit_code() == 0


COMES_BACK = """
@Wrapper(finalize=SayRecords(), **seconds(heartbeat_interval=0.1, heartbeat_timeout=2, monitor_process_interval=0.1))
def train(call: CallWrapper):
    say("monitor", monitor_process(call).pid)
    rank = join(call)
    if call.iteration == 0:
        threading.Event().wait()  # until this rank is interrupted
    while not os.path.exists(FOLDER + "/left"):
        time.sleep(0.01)
    return rank

meet()
"""


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, as a pause of their node does, and let them run again."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_rank_that_comes_back_after_it_was_counted_as_lost_gets_a_restart_error(ranks: Ranks, tmp_path: Path) -> None:
    with ranks(tmp_path, COMES_BACK + END, 2) as (first, second):
        monitor = int(second.wait_for("^monitor (.*)")[1])
        for rank, process in enumerate((first, second)):
            trains(process, rank, 2, 0)
        with stopped(monitor, second.process.pid):
            first.wait_for("^records 1:UNRESPONSIVE$")
            trains(first, 0, 1, 1)
        second.wait_for("^raised RestartError rank 1 counts as lost: the other ranks continue without it because of")
        assert second.exit_code() == 0
        (tmp_path / "left").touch()
        first.wait_for("^returned 0$")
        assert first.exit_code() == 0
        assert "trains 0 of 1 iteration 2" not in first.text


REDUCES = """
@Wrapper(last_call_wait=timedelta(0), **seconds(heartbeat_timeout=100, soft_timeout=103, hard_timeout=105))
def train(call: CallWrapper):
    join(call)
    say("monitor", monitor_process(call).pid)
    while call.iteration == 0:
        dist.all_reduce(torch.ones(1))  # until a rank is killed
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return os.environ["RANK"]

meet()
"""


@pytest.mark.parametrize("with_monitor", [False, True], ids=["its process", "its monitor process too"])
def test_the_others_go_on_at_once_when_a_rank_is_killed(ranks: Ranks, with_monitor: bool, tmp_path: Path) -> None:
    """Its heartbeats would be missed after 100 s. The store's server sees that its connections are closed."""
    with ranks(tmp_path, REDUCES + END, 3) as (first, killed, third):
        for rank, process in enumerate((first, killed, third)):
            trains(process, rank, 3, 0)
        monitor = int(killed.wait_for("^monitor (.*)")[1])
        for pid in [killed.process.pid, *([monitor] if with_monitor else [])]:
            os.kill(pid, signal.SIGSTOP)  # none of them sees the end of the other
        for pid in [killed.process.pid, *([monitor] if with_monitor else [])]:
            os.kill(pid, signal.SIGKILL)
        since = time.monotonic()
        for rank, process in enumerate((first, third)):
            trains(process, rank, 2, 1)
        print("seconds from SIGKILL to the next iteration:", time.monotonic() - since)
        for rank, process in enumerate((first, third)):
            process.wait_for(f"^returned {rank}$")
            assert process.exit_code() == 0

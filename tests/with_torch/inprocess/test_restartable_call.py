"""What a process tells its agent of its calls; the test is the agent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from elasticjob._runtime.contract import restart_messages
from elasticjob._runtime.contract.names import PRESTART_ROUND, Env, RoundId
from elasticjob._runtime.contract.restart_messages import (
    MAX_MESSAGE,
    CallAgain,
    Calling,
    End,
    Interrupt,
    Interrupted,
    Parked,
    Raised,
)

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from elasticjob.inprocess._groups import process_groups  # noqa: E402
from elasticjob.inprocess._restartable import restartable  # noqa: E402
from elasticjob.inprocess._restartable.agent_channel import AgentChannel  # noqa: E402
from elasticjob.inprocess._restartable.timeout_guard import TimeoutGuard  # noqa: E402
from elasticjob.training import progress_channel  # noqa: E402
from elasticjob.training.progress_channel import Stopped  # noqa: E402

FIRST, SECOND = RoundId(1, 0, 1), RoundId(1, 0, 2)
PEER_CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


class PeerClosedError(Exception):
    """An error as gloo raises it, which calls `on_read` when its text is read for the first time."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._on_read = [on_read]

    def __str__(self) -> str:
        while self._on_read:
            self._on_read.pop()()
        return PEER_CLOSED


PeerClosedError.__name__ = "RuntimeError"


class Agent:
    """Has the function called again after its first call."""

    def __init__(self) -> None:
        self.answer: Any = CallAgain(SECOND, ())
        self.connection, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = AgentChannel(worker)
        self.received: list[Any] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def join(self) -> list[Any]:
        """Wait for the end of the connection, and return what came."""
        self._thread.join(60)
        return self.received

    def send(self, message: Any) -> None:
        self.connection.send(restart_messages.to_packet(message))

    def _serve(self) -> None:
        while packet := self.connection.recv(MAX_MESSAGE):
            message = restart_messages.from_packet(packet)
            self.received.append(message)
            if isinstance(message, Parked):
                self.send(self.answer)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setenv(Env.ROUND, str(FIRST))
    return Agent()


def run(agent: Agent, error: Exception) -> list[Any]:
    """Let the first call fail with `error` and the second return; return what the agent has received."""
    call = restartable.RestartableCall(agent.channel)
    left = [error]

    def function() -> str:
        if left:
            raise left.pop()
        return "returned"

    assert call.run(function) == "returned"
    call.close()
    return agent.join()


AGAIN = [Parked(FIRST), Calling(SECOND)]


def test_an_error_of_this_rank_is_reported_at_once(agent: Agent) -> None:
    assert run(agent, ValueError("bad batch")) == [Calling(FIRST), Raised(FIRST, "ValueError", "bad batch"), *AGAIN]


def test_a_rank_whose_collective_failed_leaves_with_the_end_of_the_round(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent of the peer at fault ends the round: this rank prints no traceback and reports nothing."""
    monkeypatch.setattr(restartable, "PEER_TIMEOUT", 60.0)
    received = run(agent, PeerClosedError(lambda: agent.send(Interrupt(FIRST))))
    assert received == [Calling(FIRST), Interrupted(FIRST), *AGAIN]
    assert capsys.readouterr().err == ""


def test_a_rank_whose_collective_failed_reports_it_if_the_round_goes_on(agent: Agent) -> None:
    assert run(agent, PeerClosedError(lambda: None)) == [
        Calling(FIRST),
        Raised(FIRST, "RuntimeError", PEER_CLOSED),
        *AGAIN,
    ]


def test_a_process_that_was_started_ahead_waits_for_its_first_round(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.ROUND, str(PRESTART_ROUND))
    warmed_up: list[bool] = []

    def warm_up() -> bool:
        warmed_up.append(bool(agent.received))
        return True

    monkeypatch.setattr(restartable, "warm_up", warm_up)
    call = restartable.RestartableCall(agent.channel)
    assert call.run(lambda: "returned") == "returned"
    call.close()
    assert agent.join() == [Parked(PRESTART_ROUND), Calling(SECOND)]
    assert warmed_up == [False], "before it says that it waits"


def test_a_group_that_the_script_has_made_before_the_function_is_left_alone(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    monkeypatch.setenv(Env.ROUND, str(PRESTART_ROUND))
    call = restartable.RestartableCall(agent.channel)
    try:
        assert call.run(lambda: dist.group.WORLD) is group
    finally:
        dist.destroy_process_group()
        call.close()


def test_a_process_that_was_started_ahead_does_not_call_its_function_without_an_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(Env.ROUND, str(PRESTART_ROUND))
    with pytest.raises(Stopped):
        restartable.restartable(lambda: pytest.fail("called before its round"))()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_process_without_a_next_round_keeps_its_state_and_ends(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """An error in that hides nothing. At once: without the script's own clean-up."""
    agent.answer = End(at_once)
    kept: list[str] = []

    def copy_state() -> None:
        kept.append("state")
        raise RuntimeError("no memory")

    def exit_now(code: int) -> None:
        raise KeyboardInterrupt(code)

    monkeypatch.setattr(progress_channel.channel, "copy_state", copy_state)
    monkeypatch.setattr("os._exit", exit_now)
    with pytest.raises(KeyboardInterrupt if at_once else ValueError):
        run(agent, ValueError("bad batch"))
    assert kept == ["state"]


def test_a_process_that_stops_at_the_last_step_says_so_before_its_groups_end(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end without an abort, which may take longer than the grace that the agent gives a function."""
    left: list[bool] = []

    def leave(_groups: object, *, planned: bool = False) -> None:
        left.append(planned)

    monkeypatch.setattr(process_groups.ProcessGroups, "leave", leave)
    call = restartable.RestartableCall(agent.channel)
    ends = iter([Stopped(0), ValueError("bad batch")])

    def function() -> str:
        for error in ends:
            raise error
        return "returned"

    assert call.run(function) == "returned"
    call.close()
    first, second, *rest = agent.join()
    assert (first, second, rest[0]) == (Calling(FIRST), Interrupted(FIRST), Parked(FIRST, at_last_step=True))
    assert left == [True, False]


def test_a_process_whose_device_has_failed_ends(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error stays with the device: the process takes no part in another round, and does not say that it waits."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(process_groups, "synchronize_device", synchronize)
    call = restartable.RestartableCall(agent.channel)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call.run(fails)
    call.close()
    assert agent.join() == [Calling(FIRST), Raised(FIRST, "ValueError", "bad batch")]


# ---- calls of a restartable function that are ordinary ones


def fails() -> None:
    raise ValueError("bad batch")


@pytest.fixture
def connected(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The agent to which the first call of a restartable function connects. Another connection is an error."""
    monkeypatch.setattr(AgentChannel, "open", iter([agent.channel]).__next__)
    monkeypatch.setattr(restartable, "has_been_called", False)
    return agent


def test_the_second_call_in_a_process_is_an_ordinary_one(connected: Agent) -> None:
    """A process that is forked anew begins with the first call. An error of the second one reaches the script."""
    calls = iter(["fails", "returns", "fails"])

    @restartable.restartable
    def train(argument: str) -> str:
        if next(calls) == "fails":
            raise ValueError("bad batch")
        return argument

    assert train("first") == "first"
    assert connected.join() == [Calling(FIRST), Raised(FIRST, "ValueError", "bad batch"), *AGAIN]
    with pytest.raises(ValueError, match="bad batch"):
        train("second")


def test_a_call_from_another_thread_is_an_ordinary_one(connected: Agent) -> None:
    """Only the main thread can be interrupted. Its call can still be called again."""
    with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match="bad batch"):
        other.submit(restartable.restartable(fails)).result()
    assert restartable.restartable(lambda: "returned")() == "returned"
    assert connected.join() == [Calling(FIRST)]


def test_a_restartable_function_that_another_one_calls_is_an_ordinary_one(connected: Agent) -> None:
    @restartable.restartable
    def outer() -> str:
        with pytest.raises(ValueError, match="bad batch"):
            restartable.restartable(fails)()
        return "returned"

    assert outer() == "returned"
    assert connected.join() == [Calling(FIRST)]


# ---- what torch reads when it creates an nccl group

ERRORS, RETHROW, DUMP, WAIT, TRACE, RECORDER, BLOCKING = NCCL = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_BLOCKING_WAIT",
)
USERS = {Env.SET_BY_USER: ERRORS}
KEPT = {ERRORS: "0", RETHROW: "0"}


@pytest.mark.parametrize(
    ("before", "changed", "guarded"),
    [
        ({ERRORS: "3", Env.ROUND: "1.0.1"}, KEPT | {DUMP: "0", WAIT: "1"}, True),  # the agent's default
        ({ERRORS: "1"}, KEPT | {DUMP: "0", WAIT: "1"}, True),  # torchrun's default
        ({}, KEPT | {DUMP: "0", WAIT: "1"}, True),
        ({ERRORS: "1"} | USERS, {WAIT: "1"}, False),
        ({ERRORS: "0"} | USERS, {RETHROW: "0", WAIT: "1"}, False),
        ({ERRORS: "3", WAIT: "500"} | USERS, {}, False),
        ({ERRORS: "1", DUMP: "1"}, KEPT | {WAIT: "1"}, True),
        ({ERRORS: "1", RETHROW: "1", TRACE: "2000"}, {ERRORS: "0"}, True),
        ({ERRORS: "1", RECORDER: "2000"}, KEPT, True),
        ({ERRORS: "1", TRACE: "0", RECORDER: "0"}, KEPT | {DUMP: "0", WAIT: "1"}, True),
        ({ERRORS: "1", BLOCKING: "1"}, KEPT | {DUMP: "0", WAIT: "1"}, False),  # torch raises in the main thread
    ],
)
def test_nccl_leaves_the_process_alone_unless_the_user_has_set_something_else(
    before: dict[str, str], changed: dict[str, str], guarded: bool, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog would end the process when a peer is lost, and the end of a group would wait for a dump.

    What torch would have ended is guarded then, and nothing else.
    """
    watched: list[bool] = []

    @contextmanager
    def watch(_guard: object, _round: RoundId, *, active: bool) -> Iterator[None]:
        watched.append(active)
        yield

    monkeypatch.setattr(TimeoutGuard, "watch", watch)
    monkeypatch.setenv(Env.SET_BY_USER, "")
    for name in NCCL:
        monkeypatch.setenv(name, "")  # so that its value is restored
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    call = restartable.RestartableCall(agent.channel)
    found = call.run(lambda: {name: os.environ[name] for name in NCCL if name in os.environ})
    assert found == {name: value for name, value in before.items() if name in NCCL} | changed
    call.close()
    assert watched == [guarded]

"""Arguments of the wrapper: types, defaults, and rules."""

from __future__ import annotations

import inspect
import socket
from datetime import timedelta
from typing import Any

import pytest

from elasticjob.inprocess._arguments.times import Times, check_log_file

pytest.importorskip("torch.distributed")

from elasticjob.inprocess import (
    AbortTorchDistributed,
    Completion,
    ShiftRanks,
    State,
    StoreMixin,
    TCPStore,
    Wrapper,
)
from elasticjob.inprocess._stores import store_server

S = timedelta(seconds=1)
DEFAULTS = {
    "store_kwargs": None,
    "initialize": None,
    "completion": None,
    "terminate": None,
    "finalize": None,
    "health_check": None,
    "rank_filter": None,
    "monitor_thread_interval": 1 * S,
    "monitor_process_interval": 1 * S,
    "heartbeat_interval": 1 * S,
    "heartbeat_timeout": 30 * S,
    "progress_watchdog_interval": 1 * S,
    "soft_timeout": 60 * S,
    "hard_timeout": 90 * S,
    "barrier_timeout": 120 * S,
    "completion_timeout": 120 * S,
    "last_call_wait": 1 * S,
    "termination_grace_time": 5 * S,
    "monitor_process_logfile": None,
    "enabled": True,
}
HOOKS = ("initialize", "abort", "completion", "terminate", "finalize", "health_check", "rank_assignment", "rank_filter")


class Saved(Completion):
    def __call__(self, state: State) -> None: ...


def test_arguments_have_the_defaults_of_the_source_and_are_keywords() -> None:
    parameters = inspect.signature(Wrapper).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults.pop("store_factory") is TCPStore
    assert isinstance(defaults.pop("abort"), AbortTorchDistributed)
    assert isinstance(defaults.pop("rank_assignment"), ShiftRanks)
    assert defaults == DEFAULTS
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert issubclass(TCPStore, StoreMixin)


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if isinstance(value, timedelta)])
@pytest.mark.parametrize("value", [5, 1.0, None, True])
def test_a_time_is_a_timedelta(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be timedelta, not {value}"):
        Wrapper(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store_factory": dict}, "store_factory must be a class derived from StoreMixin, not <class 'dict'>"),
        ({"store_factory": None}, "store_factory must be a class derived from StoreMixin, not None"),
        ({"store_kwargs": [1]}, r"store_kwargs must be dict or None, not \[1\] \(list\)"),
        ({"rank_assignment": None}, "rank_assignment must be an instance of RankAssignment, not None"),
        ({"completion": Saved}, r"completion must be .* Completion or None, not .*: write completion=Saved\(\)"),
        ({"monitor_process_logfile": 1}, r"monitor_process_logfile must be str or None, not 1 \(int\)"),
        ({"enabled": 1}, r"enabled must be bool, not 1 \(int\)"),
        ({"enabled": None}, "enabled must be bool, not None"),
        *(({hook: print}, f"{hook} must be an instance of .*, not <built-in function print>") for hook in HOOKS),
    ],
)
def test_other_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Wrapper(**arguments)


@pytest.mark.parametrize(
    ("shorter", "longer", "value"),
    [
        ("soft_timeout", "hard_timeout", 90),
        ("hard_timeout", "barrier_timeout", 120),
        ("monitor_process_interval", "barrier_timeout", 120),
        ("heartbeat_timeout", "barrier_timeout", 120),
        ("monitor_process_interval", "heartbeat_timeout", 30),
        ("heartbeat_interval", "heartbeat_timeout", 30),
        ("monitor_thread_interval", "soft_timeout", 60),
        ("progress_watchdog_interval", "soft_timeout", 60),
    ],
)
def test_times_that_must_be_less_than_others(shorter: str, longer: str, value: int) -> None:
    message = f"{shorter} \\({value} s\\) must be less than {longer} \\({value} s\\): decrease .* or increase {longer}"
    with pytest.raises(ValueError, match=message):
        Times(**{shorter: value * S})


@pytest.mark.parametrize(
    "times",
    [
        {"soft_timeout": 89.9 * S, "hard_timeout": 119.9 * S, "heartbeat_timeout": 119.9 * S},
        {"monitor_thread_interval": 59.9 * S, "progress_watchdog_interval": 59.9 * S},
        {"monitor_process_interval": 29.9 * S, "heartbeat_interval": 29.9 * S},
    ],
)
def test_times_may_be_a_moment_less(times: dict[str, timedelta]) -> None:
    Times(**times)


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if isinstance(value, timedelta)])
def test_times_are_positive(name: str) -> None:
    zero_is_allowed = name in ("last_call_wait", "termination_grace_time")
    with pytest.raises(ValueError, match=f"{name} must be .* 0 s, not -1 s"):
        Times(**{name: -1 * S})
    if zero_is_allowed:
        Times(**{name: 0 * S})
    else:
        with pytest.raises(ValueError, match=f"{name} must be more than 0 s, not 0 s"):
            Times(**{name: 0 * S})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("logs/monitor.log", "must be an absolute path, not 'logs/monitor.log': write /logs/monitor.log"),
        ("/tmp/{host}.log", "may contain the placeholder {rank} and no other braces"),
        ("/tmp/{rank.x}.log", "may contain the placeholder {rank} and no other braces"),
        ("/tmp/{.log", "may contain the placeholder {rank} and no other braces"),
    ],
)
def test_log_files_that_are_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wrapper(monitor_process_logfile=path)


def test_a_log_file_is_absolute_and_may_contain_the_rank() -> None:
    check_log_file("/tmp/monitor-{rank}.log")
    check_log_file(None)


def test_the_completion_barrier_waits_in_chunks() -> None:
    assert Times(soft_timeout=61 * S, progress_watchdog_interval=1 * S).completion_chunk == 30 * S


def test_a_disabled_wrapper_returns_the_function_itself() -> None:
    def train() -> None: ...

    assert Wrapper(enabled=False)(train) is train


def test_the_wrapped_function_has_the_name_of_the_function() -> None:
    def train() -> None:
        """Train."""

    wrapped = Wrapper()(train)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("train", "Train.", train)  # type: ignore[attr-defined]


def test_a_torch_without_distributed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"this torch has no torch\.distributed: write enabled=False"):
        Wrapper()


def test_a_port_that_is_in_use_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "BIND_TIMEOUT", 0.1)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} for the wrapper's store is in use .*: set store_kwargs"):
            TCPStore("localhost", port, is_master=True)

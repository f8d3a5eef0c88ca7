"""Hooks that come with the wrapper, hooks of several, and the state that they get."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import elasticjob.inprocess
from elasticjob.inprocess._stores.store_mixin import BarrierTimeoutError
from elasticjob.inprocess.abort import Abort
from elasticjob.inprocess.attribution import Interruption
from elasticjob.inprocess.completion import Completion
from elasticjob.inprocess.composition import compose
from elasticjob.inprocess.exception import HealthCheckError, InternalError, RestartAbort, RestartError
from elasticjob.inprocess.finalize import Finalize, ThreadedFinalize
from elasticjob.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from elasticjob.inprocess.initialize import Initialize, RetryController
from elasticjob.inprocess.rank_assignment import ShiftRanks
from elasticjob.inprocess.state import State, Status
from elasticjob.inprocess.terminate import Terminate

STATE = State(1, 4, 1, 4).activate_all_ranks()


def test_a_state_comes_from_the_launchers_environment() -> None:
    assert State.from_environment({"RANK": "1", "WORLD_SIZE": "4"}) == State(1, 4, 1, 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "4"}, "variable RANK must be a number, not ''"),
        ({"RANK": "1", "WORLD_SIZE": "x"}, "variable WORLD_SIZE must be a number, not 'x'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
    ],
)
def test_an_incomplete_environment_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        State.from_environment(environ)


def test_the_ranks_of_a_state() -> None:
    spare = State(2, 3, 5, 6).activate(2)
    assert (spare.status, spare.active_rank, spare.is_active) == (Status.INACTIVE, None, False)
    active = STATE.activate(2)
    assert (active.status, active.active_rank, active.is_active) == (Status.ACTIVE, 1, True)
    assert active.distributed_variables() == {"RANK": "1", "WORLD_SIZE": "2"}
    assert active.terminate().status is Status.TERMINATED
    assert active.advance().iteration == 1


def test_a_cuda_health_check_reports_an_error_of_the_device_and_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def fails(device: int) -> None:
        raise RuntimeError(f"CUDA error: an illegal memory access on {device}")

    def use(synchronize: Callable[[int], object], *, initialized: bool = True) -> None:
        cuda = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: initialized, current_device=lambda: 3,
            synchronize=synchronize, device_count=lambda: 4,
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    check, hanging, synchronized = CudaHealthCheck(timedelta(milliseconds=50)), threading.Event(), list[int]()
    use(synchronized.append)
    check(STATE, None)
    for local_rank in ("1", "4"):  # a device of its own, and one that this rank does not see
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        check(STATE, None)
    assert synchronized == [3, 1, 3]
    use(fails, initialized=False)
    check(STATE, None)
    use(fails)
    with pytest.raises(RuntimeError, match="an illegal memory access on 3"):
        check(STATE, None)
    use(lambda device: hanging.wait(30))
    with pytest.raises(TimeoutError, match="CUDA device 3 did not finish its work within"):
        check(STATE, None)
    hanging.set()


@pytest.mark.parametrize(
    ("controller", "iteration", "message"),
    [
        (RetryController(max_iterations=3), 2, None),
        (RetryController(max_iterations=3), 3, "3 calls of the function failed: max_iterations=3"),
        (RetryController(), 1000, None),
        (RetryController(min_world_size=4), 0, None),
        (RetryController(min_world_size=5), 0, "4 ranks are left: min_world_size=5"),
        (RetryController(min_active_world_size=4), 0, "3 ranks would be active: min_active_world_size=4"),
    ],
)
def test_a_retry_controller_ends_the_job(controller: Initialize, iteration: int, message: str | None) -> None:
    state = State(0, 4, 0, 4, iteration=iteration).activate(3)
    if message is None:
        assert controller(state) is None
    else:
        with pytest.raises(RestartAbort, match=message):
            controller(state)


def test_a_fault_counter_counts_the_exceptions_of_its_rank() -> None:
    check = FaultCounter(max_rank_faults=1)
    check(STATE, None)
    check(STATE, ValueError())
    check(STATE, None)
    with pytest.raises(RuntimeError, match="2 exceptions on this rank: max_rank_faults=1"):
        check(STATE, ValueError())
    unlimited = FaultCounter()
    for _ in range(100):
        unlimited(STATE, ValueError())


def test_all_errors_of_the_wrapper_have_one_base_class() -> None:
    assert all(issubclass(error, RestartError) for error in (HealthCheckError, InternalError, BarrierTimeoutError))


def test_the_seventh_kind_of_interruption_has_nvidias_name_too() -> None:
    assert Interruption["MONITOR_PROCESS_EXCEPTION"] is Interruption.MONITOR_PROCESS
    assert len(Interruption) == 7


def test_a_finalize_in_a_thread_has_a_time_limit() -> None:
    release = threading.Event()
    called: list[object] = []
    ThreadedFinalize(timeout=timedelta(seconds=10), fn=called.append, args=("x",))(STATE, None)
    assert called == ["x"]
    with pytest.raises(ZeroDivisionError):
        ThreadedFinalize(timedelta(seconds=10), lambda: 1 / 0)(STATE, None)
    with pytest.raises(TimeoutError, match=r"did not return within 0:00:00\.01"):
        ThreadedFinalize(timedelta(milliseconds=10), release.wait)(STATE, None)
    release.set()


def hook(base: type, name: str, calls: list[str], result: object = None) -> Any:
    def call(self: object, state: State, *_: object) -> object:
        calls.append(f"{name} {state.rank}")
        return result

    return type("Hook", (base,), {"__call__": call})()


@pytest.mark.parametrize("base", [Initialize, Abort, Completion, Terminate, Finalize, HealthCheck])
def test_composed_hooks_are_called_in_order_and_are_of_their_kind(base: type) -> None:
    calls: list[str] = []
    composed: Any = compose(hook(base, "first", calls), hook(base, "second", calls))
    assert issubclass(type(composed), base)
    composed(*(STATE, None)[: 2 if base in (Finalize, HealthCheck) else 1])
    assert calls == ["first 1", "second 1"]


def test_composed_initializes_pass_their_state_on() -> None:
    calls: list[str] = []
    changed = STATE.with_rank(3, 4)
    first, second = hook(Initialize, "first", calls, changed), hook(Initialize, "second", calls)
    assert compose(first, second)(STATE) == changed
    assert calls == ["first 1", "second 3"]


def test_composed_aborts_are_all_called_and_surround_the_function() -> None:
    calls: list[str] = []

    class Broken(Abort):
        def __call__(self, state: State) -> None:
            raise ValueError("planned")

        @contextmanager
        def around_function(self) -> Iterator[None]:
            calls.append("before")
            yield
            calls.append("after")

        def after_function(self) -> None:
            calls.append("release")

    composed = compose(Broken(), hook(Abort, "second", calls))
    with composed.around_function():
        composed(STATE)
    composed.after_function()
    assert calls == ["before", "second 1", "after", "release"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: compose(print),
            "needs hooks derived from one of RankAssignment, .*; <built-in function print> is not",
        ),
        (lambda: compose(RetryController(), ShiftRanks()), "must be an instance of Initialize"),
        (lambda: compose(ShiftRanks(), RetryController()), "must be an instance of RankAssignment or RankFilter"),
    ],
)
def test_hooks_of_different_kinds_are_not_composed(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_the_package_is_imported_without_torch_and_names_all_that_is_public() -> None:
    root = str(Path(elasticjob.inprocess.__file__).parents[2])
    program = f"""
import sys
sys.path.insert(0, {root!r})
import elasticjob.inprocess
import elasticjob.inprocess._monitors.monitor_main, elasticjob.inprocess._stores.store_server
assert "torch" not in sys.modules
assert set(elasticjob.inprocess._MODULES) == set(elasticjob.inprocess.__all__)
"""
    subprocess.run([sys.executable, "-c", program], check=True)

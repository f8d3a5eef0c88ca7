"""The thread that interrupts the main thread when an iteration ends early, with a store in memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob.inprocess._call.log_setup import LOGGER, LogSetup
from elasticjob.inprocess._stores.store_mixin import IterationOutcome, StoreMixin
from elasticjob.inprocess._threads.interruption import INTERRUPT_SIGNAL, Interrupter, RankShouldRestart
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord
from elasticjob.inprocess.monitor_thread import MonitorThread
from elasticjob.training import devices
from support.training.dict_store import DictStore


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    interrupter = Interrupter()
    yield interrupter
    interrupter.close()


@contextmanager
def monitored(
    store: StoreMixin,
    interrupter: Interrupter,
    find_fault: Callable[[], Interruption | None] = lambda: None,
    abort: Callable[[], None] = lambda: None,
) -> Iterator[MonitorThread]:
    thread = MonitorThread(
        rank=3,
        world_size=4,
        barrier_timeout=timedelta(seconds=20),
        store=store,
        interrupter=interrupter,
        interval=timedelta(milliseconds=2),
        find_fault=find_fault,
        abort=abort,
    )
    thread.start()
    yield thread
    store.decide(IterationOutcome.COMPLETED)
    thread.join()


def wait_in_function(interrupter: Interrupter) -> None:
    """Wait, as a function does, for an interruption."""
    with pytest.raises(RankShouldRestart), interrupter.armed():
        assert not threading.Event().wait(20), "not interrupted"


def test_an_interruption_of_any_rank_aborts_and_interrupts(interrupter: Interrupter) -> None:
    store, aborted = DictStore(), threading.Event()
    with monitored(store, interrupter, abort=aborted.set):
        threading.Timer(0.05, store.record_interrupted, [InterruptionRecord(0, Interruption.EXCEPTION)]).start()
        wait_in_function(interrupter)
        assert aborted.is_set()


def test_an_abort_waits_until_no_rank_counts_a_step(interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where work goes on behind the host. The main thread gets no exception before that either."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda: True)
    store, aborted = DictStore(), threading.Event()

    def others() -> None:
        for rank in range(3):
            while store.get("results/arrived") != b"3," + b"".join(b"%d," % r for r in range(rank)):
                pass
            assert not aborted.is_set()
            store.end_results(rank)

    with monitored(store, interrupter, abort=aborted.set):
        thread = threading.Thread(target=others)
        thread.start()
        store.record_interrupted(InterruptionRecord(0, Interruption.EXCEPTION))
        wait_in_function(interrupter)
        thread.join()
        assert aborted.wait(20)


def test_an_iteration_that_completes_interrupts_nothing(interrupter: Interrupter) -> None:
    with monitored(DictStore(), interrupter) as thread:
        pass
    assert not interrupter.pending
    assert thread.failure is None


def test_a_fault_of_this_rank_is_recorded_once(interrupter: Interrupter) -> None:
    store = DictStore()
    with monitored(store, interrupter, find_fault=lambda: Interruption.SOFT_TIMEOUT):
        wait_in_function(interrupter)
    assert store.get_interruption_records() == (InterruptionRecord(3, Interruption.SOFT_TIMEOUT),)
    assert [key for operation, key in store.calls if operation == "append"] == ["interruptions", "results/arrived"]


def test_the_loss_of_the_store_interrupts(interrupter: Interrupter) -> None:
    class Lost(DictStore):
        def wait(self, keys: Any, timeout: timedelta) -> None:
            raise ConnectionResetError("planned")

    with monitored(Lost(), interrupter) as thread:
        wait_in_function(interrupter)
    assert isinstance(thread.failure, ConnectionResetError)


def test_an_interruption_is_not_raised_within_the_end_of_armed(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again at once: it may be the end of another context."""
    again: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", again.append)
    end: Any = SimpleNamespace(f_code=Interrupter.armed.__wrapped__.__code__)  # type: ignore[attr-defined]
    elsewhere: Any = SimpleNamespace(f_code=compile("", "", "exec"))
    with interrupter.armed():
        interrupter.interruption_event.set()
        interrupter.handle_signal(0, end)  # an exception there would leave the interrupter armed
        assert again == [INTERRUPT_SIGNAL]
        with pytest.raises(RankShouldRestart):
            interrupter.handle_signal(0, elsewhere)


def test_logging_is_set_up_only_for_programs_without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICJOB_INPROCESS_LOG_LEVEL", "debug")
    level = LOGGER.level
    with LogSetup(1) as setup:
        assert LOGGER.handlers == []  # pytest has some
        assert LOGGER.level == 10
    monkeypatch.setattr(LOGGER, "propagate", False)
    with LogSetup(1) as setup:
        assert LOGGER.handlers == [setup.handler]
    assert (LOGGER.handlers, LOGGER.level) == ([], level)
    monkeypatch.setenv("ELASTICJOB_INPROCESS_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="ELASTICJOB_INPROCESS_LOG_LEVEL=LOUD: write DEBUG, INFO, WARNING"):
        LogSetup(1)
    assert (LOGGER.handlers, LOGGER.level) == ([], level)

"""What rank 0 of a loop with accelerate or Fabric reports, with stand-ins of their classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.in_workers import loop_status, status_sender, trainers
from elasticjob._runtime.agent.start_workers.in_workers.loop_status import LoopStatus

Sent = list[dict[str, str]]


class Torch:
    """An optimizer of torch, whose parameters may count its steps."""

    def __init__(self, steps: int = 0) -> None:
        self.state: dict[str, dict[str, int]] = {"weight": {"step": steps}} if steps else {"weight": {}}


class Loss:
    """A tensor of so many elements."""

    def __init__(self, value: float, size: int = 1) -> None:
        self.value, self.size = value, size

    def detach(self) -> Loss:
        return Loss(self.value, self.size)

    def numel(self) -> int:
        return self.size

    def __float__(self) -> float:
        return self.value


class Clock:
    """Says when a request is due."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(status_sender, "time", clock)
    return clock


@pytest.fixture
def sent(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Make this process rank 0 of an agent, and return what it sends."""
    found: Sent = []

    def post(metrics: dict[str, str]) -> bool:
        found.append(metrics)
        return "refused" not in metrics

    monkeypatch.setattr(status_sender, "post", post)
    monkeypatch.setattr(loop_status, "atexit", ModuleTypeWithRegister("atexit"))
    monkeypatch.setattr(trainers, "made", False)  # a test before may have made a Trainer
    monkeypatch.setattr(trainers, "framework", lambda name: Script(uses=False))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:1/status")
    return found


class ModuleTypeWithRegister(ModuleType):
    def register(self, function: Any) -> None: ...


class Script:
    """`frameworks.own_callbacks`."""

    def __init__(self, *, uses: bool) -> None:
        self.uses_elasticjob = lambda: uses


def test_steps_are_sent_every_five_seconds_and_the_last_one_at_the_end(sent: Sent, clock: Clock) -> None:
    status, optimizer = LoopStatus(), Torch()
    for _ in range(3):
        status.count(optimizer)
    clock.now += 5
    status.note_loss(Loss(0.25))
    status.note({"accuracy": Loss(0.5), "note": "text", "many": Loss(1.0)})
    status.count(optimizer)
    status.note_loss(Loss(0.125))
    status.count(optimizer)
    del optimizer
    status.send_last()
    status.send_last()
    metrics = {"loss": "0.25", "accuracy": "0.5", "many": "1"}
    assert sent == [{"current_step": "1"}, metrics | {"current_step": "4"}, metrics | {"current_step": "5"}]


def test_the_optimizer_with_the_most_steps_counts_with_those_of_before(sent: Sent, clock: Clock) -> None:
    status, generator, critic = LoopStatus(), Torch(41), Torch()
    status.count(critic)
    status.count(critic)
    status.count(generator)
    clock.now += 5
    status.count(critic)
    status.count(generator)
    status.send_last()
    assert [report["current_step"] for report in sent] == ["1", "41", "42"]


def test_a_script_may_log_a_loss_of_its_own(sent: Sent, clock: Clock) -> None:
    status = LoopStatus()
    status.note_loss(Loss(9.0))
    status.note({"loss": 2})
    status.note({f"metric {index}": index for index in range(40)})
    status.count(Torch())
    assert sent[0]["loss"] == "9"
    assert len(sent[0]) == 24 + 1
    status.note_loss(Loss(9.0, size=2))
    status.note({"loss": 2})
    clock.now += 5
    status.count(Torch())
    assert sent[1]["loss"] == "2"


@pytest.mark.parametrize("why", ["rank", "a Trainer", "its own reports", "no agent", "fork"])
def test_nothing_is_sent(why: str, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    status = LoopStatus()
    if why == "rank":
        monkeypatch.setenv("RANK", "1")
    elif why == "a Trainer":
        monkeypatch.setattr(trainers, "made", True)
    elif why == "its own reports":
        monkeypatch.setattr(trainers, "framework", lambda name: Script(uses=True))
    elif why == "no agent":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://example.com/status")
    else:
        status.count(Torch())
        sent.clear()
        monkeypatch.setattr(os, "getpid", lambda: 1)
    optimizer = Torch()
    status.count(optimizer)
    status.count(optimizer)
    status.send_last()
    assert sent == []


def test_a_request_that_fails_is_the_last_one(sent: Sent, clock: Clock) -> None:
    status = LoopStatus()
    status.note({"refused": 1})
    status.count(Torch())
    clock.now += 100
    status.count(Torch())
    status.send_last()
    assert len(sent) == 1


class Gradients:
    sync_gradients = True


class AcceleratedOptimizer:
    """accelerate's."""

    step_was_skipped = False

    def __init__(self) -> None:
        self.optimizer, self.gradient_state = Torch(), Gradients()

    def step(self, closure: object = None) -> object:
        return closure


class Accelerator:
    def log(self, values: Mapping[str, object], step: int | None = None) -> object:
        return values

    def backward(self, loss: object, **named: object) -> object:
        return loss


def patched(patch: Any, kind: type, name: str = "") -> Any:
    """Return a subclass, as a framework's class of this name, after the patch of its module."""
    made = type(name or kind.__name__, (kind,), {"step": kind.step} if hasattr(kind, "step") else {})
    module = ModuleType("stand_in")
    made.__module__ = "stand_in"
    setattr(module, made.__name__, made)
    patch(module)
    return made


def test_steps_that_change_nothing_do_not_count(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_status, "process_status", LoopStatus())
    optimizer = patched(loop_status.count_accelerate, AcceleratedOptimizer)()
    optimizer.gradient_state.sync_gradients = False
    assert optimizer.step("closure") == "closure"
    optimizer.gradient_state.sync_gradients, optimizer.step_was_skipped = True, True
    optimizer.step()
    assert sent == []
    optimizer.step_was_skipped = False
    optimizer.step()
    assert sent == [{"current_step": "1"}]


def test_what_a_framework_gets_and_returns_stays(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_status, "process_status", LoopStatus())
    accelerator = patched(loop_status.note_accelerate, Accelerator)()
    assert accelerator.log(values={"accuracy": 1}, step=3) == {"accuracy": 1}
    assert accelerator.log(None) is None
    loss = Loss(0.5)
    assert accelerator.backward(loss) is loss
    assert accelerator.backward(loss, retain_graph=True) is loss
    patched(loop_status.count_fabric, AcceleratedOptimizer, "_FabricOptimizer")().step()
    assert sent == [{"loss": "0.5", "accuracy": "1", "current_step": "1"}]


def test_frameworks_stay_as_they_are_if_the_job_wants_that(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trainers.TRAINER_INTEGRATION, "None")
    step = patched(loop_status.count_accelerate, AcceleratedOptimizer).step
    assert step is AcceleratedOptimizer.step
    assert patched(loop_status.count_fabric, AcceleratedOptimizer, "_FabricOptimizer").step is step
    assert patched(loop_status.note_accelerate, Accelerator).log is Accelerator.log

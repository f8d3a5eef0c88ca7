"""Scenarios of `State.commit(non_blocking=True)` in one process, without an agent. Prints their results as JSON."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import nn

from elasticjob._runtime.contract.snapshot_format.state_block import read_header
from elasticjob._runtime.system.memory_file import memory_file
from elasticjob.training import progress_channel, random_states
from elasticjob.training.progress_channel import ChannelState
from elasticjob.training.random_states import GENERATORS
from elasticjob.training.replicated.copies import background_copy
from elasticjob.training.replicated.live.rank_memory import RankMemory
from elasticjob.training.replicated.rank_random_states import RankRandomStates
from elasticjob.training.replicated.state import State, internals
from elasticjob.training.snapshot_values import state_tree
from elasticjob.training.snapshot_values.state_tree import PackedTree


class Training:
    """A model of 4 MiB with a BatchNorm, and a moving average of it. The copy of each late commit waits at `gate`."""

    def __init__(self) -> None:
        progress_channel.channel.state = ChannelState.NO_AGENT
        progress_channel.channel.memory = tuple(memory_file("test") for _ in range(3))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(64, 1 << 11, (2, 4)), nn.BatchNorm2d(1 << 11))
        self.model.to(memory_format=torch.channels_last)
        self.average = nn.Linear(1 << 9, 1 << 9)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = State(model=self.model, optimizer=self.optimizer, average=self.average)
        self.state.sync()
        self.step()
        self.gate = threading.Event()
        self.began = threading.Event()
        start = internals(self.state).background.start

        def held(copy: Callable[[], object]) -> None:
            def copy_behind_gate() -> None:
                self.began.set()
                assert self.gate.wait(60)
                copy()

            start(copy_behind_gate)

        internals(self.state).background.start = held  # type: ignore[method-assign]

    def gradients(self) -> None:
        self.model(torch.randn(2, 64, 2, 4)).square().sum().backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step += 1

    def tensors(self) -> list[Any]:
        parts = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        moments = [value for each in self.optimizer.state.values() for value in each.values()]
        return [tensor.detach().clone() for tensor in (*parts, *moments)]

    def commit_late(self) -> list[Any]:
        """Begin a commit, and return the tensors as they are now."""
        self.gate.clear()
        self.began.clear()
        committed = self.tensors()
        self.state.commit(non_blocking=True)
        assert self.began.wait(60)
        return committed

    def kept(self) -> int:
        """Return the step of the newest commit."""
        return internals(self.state).copies.newest()[1].step

    def loaded(self) -> tuple[int, list[Any]]:
        """Return what a new process loads."""
        memory, next_process = progress_channel.channel.memory, Training.__new__(Training)
        Training.__init__(next_process)
        progress_channel.channel.memory = memory
        parts = {"model": next_process.model, "optimizer": next_process.optimizer, "average": next_process.average}
        state = State(**parts)
        state.sync()
        return state.step, next_process.tensors()


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def trains_meanwhile() -> dict[str, Any]:
    """What a forward pass and a moving average change is copied at once; the step waits for the rest."""
    training = Training()
    committed = training.commit_late()
    training.gradients()
    with torch.no_grad():
        training.average.weight.fill_(7.0)
    meanwhile = training.kept()
    wait = internals(training.state).live.before_change

    def open_and_wait() -> None:
        training.gate.set()
        wait()

    internals(training.state).live.before_change = open_and_wait
    training.optimizer.step()
    found = {"meanwhile": meanwhile, "after the step": training.kept()}
    step, loaded = training.loaded()
    return found | {"loaded": step, "same": same(loaded, committed), "changed": not same(training.tensors(), committed)}


def changed(how: Callable[[Any], object], then: str = "step") -> dict[str, Any]:
    """Something else than the optimizer changes a parameter before it is copied."""
    training = Training()
    training.gate.set()
    committed = training.tensors()
    training.state.commit()
    training.step()
    newer = training.commit_late()
    with torch.no_grad():
        how(training.model[0].weight)
    training.gate.set()
    error, number = "", internals(training.state).sequence.number
    try:
        training.optimizer.step() if then == "step" else training.state.commit()
    except RuntimeError as raised:
        error = str(raised)
    counted = internals(training.state).sequence.number > number
    step, loaded = training.loaded()
    return {"error": error, "kept": step, "same": same(loaded, committed if step == 1 else newer), "counted": counted}


def copy_fails() -> dict[str, Any]:
    """The step that waits for a copy raises what has prevented it, before it changes anything."""
    training = Training()

    def begin(*_: Any) -> Any:
        return bytearray(1 << 26), lambda: 1 / 0

    internals(training.state).copies.begin = begin  # type: ignore[method-assign,assignment]
    training.gate.set()
    training.state.commit(non_blocking=True)
    try:
        training.optimizer.step()
    except ZeroDivisionError as error:
        return {"error": str(error), "changing": training.state.changing}
    return {}


def another_state() -> dict[str, Any]:
    """A State that is made while a copy is under way waits for it: both have the same memory."""
    training = Training()
    training.commit_late()
    threading.Timer(0.2, training.gate.set).start()
    State(other=1)
    return {"kept": training.kept()}


def swapped_and_back() -> dict[str, Any]:
    """Averaged weights are loaded by `.data` for an evaluation, and the own ones back, while tensors are copied."""
    training = Training()
    weight, calls = training.model[0].weight, itertools.count()
    own, average = weight.detach().clone(), torch.zeros_like(weight)
    original = state_tree.write_tensors

    def write(*arguments: Any) -> None:
        weight.data.copy_(average if next(calls) == 0 else own)
        original(*arguments)

    training.state.commit(non_blocking=True)
    with mock.patch.object(background_copy, "write_tensors", write):
        training.gate.set()
        try:
            internals(training.state).background.wait()
        except RuntimeError as error:
            return {"error": str(error)}
    return {}


def interrupted_wait() -> dict[str, Any]:
    """The end of a round interrupts a step that waits. What comes next waits for the copy all the same."""
    training = Training()
    committed = training.commit_late()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    interrupted = False
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        training.optimizer.step()
    except KeyboardInterrupt:
        interrupted = True
    threading.Timer(0.3, training.gate.set).start()
    training.state.sync()
    found = {"interrupted": interrupted, "kept": training.kept()}
    _, loaded = training.loaded()
    return found | {"same": same(loaded, committed)}


def process_ends() -> dict[str, Any]:
    """A process that ends after further steps copies these once the commit is complete: there are two copies then."""
    training = Training()
    training.commit_late()
    training.state.step += 1
    threading.Timer(0.3, training.gate.set).start()
    internals(training.state).copy_live()
    steps = [read_header(descriptor).step for descriptor in progress_channel.channel.memory[:2]]
    return {"kept": training.kept(), "copies": sorted(steps)}


def fork_meanwhile() -> dict[str, Any]:
    """A process that was forked while a copy is under way has no such thread, and waits for none."""
    training = Training()
    training.commit_late()
    pid = os.fork()
    if pid == 0:
        internals(training.state).background.wait()
        os._exit(7)
    status = os.waitpid(pid, 0)[1]
    training.gate.set()
    return {"exit code": os.waitstatus_to_exitcode(status)}


def no_threads() -> dict[str, Any]:
    """Without another thread the copy is complete when `commit` returns; if its start is interrupted there is none."""
    training = Training()
    training.gate.set()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        training.state.commit(non_blocking=True)
    kept = training.kept()
    training.step()
    with mock.patch.object(threading.Thread, "start", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        training.state.commit(non_blocking=True)
    training.step()
    return {"kept": kept, "interrupted": training.kept()}


def earlier_state() -> dict[str, Any]:
    """An earlier State of the process, which does not know when its optimizer begins a step, copies at once."""
    training = Training()
    State(other=1)
    training.state.commit(non_blocking=True)
    return {"kept": training.kept(), "began": training.began.is_set()}


def copied_late() -> dict[str, Any]:
    """What is copied late: large tensors without gaps that an optimizer changes."""
    training = Training()
    large = 1 << 18
    with torch.inference_mode():
        inference = nn.Parameter(torch.zeros(large), requires_grad=False)
    gaps = nn.Parameter(torch.zeros(large, 2)[:, 0])
    frozen = nn.Parameter(torch.zeros(large), requires_grad=False)
    training.model.register_parameter("inference", inference)
    training.model.register_parameter("gaps", gaps)
    training.model.register_parameter("frozen", frozen)
    optimizer = torch.optim.SGD([inference, gaps])
    objects = {"model": training.model, "optimizer": training.optimizer, "other": optimizer}
    packed = PackedTree({name: part.state_dict() for name, part in objects.items()}, {})
    late = background_copy.LateTensors(packed, objects)
    names = [late.names[tensor.data_ptr()] for _, tensor in late.tensors]
    return {"late": sorted(names), "all": len(late.tensors) + len(late.others) == len(packed.tensors)}


def alike_after_going_back() -> dict[str, Any]:
    """All ranks go back to the commit before the newest of their random states, and still know what they have alike."""
    memory = memory_file("ranks")
    before = RankRandomStates(RankMemory(memory, 0))
    before.record_equal_generators([True] * len(GENERATORS))
    states = random_states.capture()
    before.store((1, 1), states, (0, 0))
    before.store((2, 2), states, (1, 1))
    after = RankRandomStates(RankMemory(memory, 0))
    own, _ = after.find((0, 0), {})
    after.set_for((1, 1), own, before.shared(states), [None] * len(GENERATORS), finishes_step=False)
    return {"own": own, "alike": all(after.shared(states)["alike"])}


def without_optimizer() -> dict[str, Any]:
    """Nothing says when a model is changed that has no optimizer: all of it is copied at once."""
    training = Training()
    state = State(model=training.model, average=training.average)
    start, gate = internals(state).background.start, threading.Event()
    internals(state).background.start = lambda copy: start(lambda: (gate.wait(60), copy()))  # type: ignore[method-assign]
    committed = training.tensors()
    state.commit(non_blocking=True)
    with torch.no_grad():
        training.model[0].weight.data.fill_(3.0)
        training.average.weight.fill_(3.0)
    gate.set()
    memory, next_process = progress_channel.channel.memory, Training()
    progress_channel.channel.memory = memory
    State(model=next_process.model, average=next_process.average).sync()
    parts = len(training.model.state_dict()) + len(training.average.state_dict())
    return {"same": same(next_process.tensors()[:parts], committed[:parts])}


def planned_end_after_a_change() -> dict[str, Any]:
    """A planned end commits the state of its step, also if a commit before it has failed."""
    training = Training()
    training.commit_late()
    with torch.no_grad():
        training.model[0].weight.fill_(3.0)
    training.gate.set()
    internals(training.state).end_round()
    step, loaded = training.loaded()
    return {"kept": step, "same": same(loaded, training.tensors())}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "trains meanwhile": trains_meanwhile,
    "in place": lambda: changed(lambda weight: weight.fill_(3.0)),
    "one element": lambda: changed(lambda weight: weight.as_strided((1,), (1,), 1).add_(1)),
    "by data": lambda: changed(lambda weight: weight.data.fill_(3.0)),
    "then committed": lambda: changed(lambda weight: weight.fill_(3.0), then="commit"),
    "replaced": lambda: changed(lambda weight: setattr(weight, "data", torch.zeros_like(weight))),
    "copy fails": copy_fails,
    "another state": another_state,
    "process ends": process_ends,
    "without optimizer": without_optimizer,
    "planned end": planned_end_after_a_change,
    "swapped and back": swapped_and_back,
    "interrupted wait": interrupted_wait,
    "fork": fork_meanwhile,
    "no threads": no_threads,
    "earlier state": earlier_state,
    "copied late": copied_late,
    "alike": alike_after_going_back,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({name: scenario() for name, scenario in SCENARIOS.items()}, sys.stdout)

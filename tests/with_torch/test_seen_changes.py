"""Which changes of the model a State sees, so that an interruption inside of them does not go unnoticed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from elasticjob.training import devices, progress_channel  # noqa: E402
from elasticjob.training.replicated.changes import watched_torch  # noqa: E402
from elasticjob.training.replicated.state import State, internals  # noqa: E402
from elasticjob.training.update_guard import RankShouldRestart, guard  # noqa: E402

pytestmark = pytest.mark.torch


class Graph:
    """A CUDA graph: its replay runs no Python."""

    capturing = False

    def __init__(self) -> None:
        self.replayed = 0

    def capture_begin(self) -> None:
        Graph.capturing = True

    def capture_end(self) -> None:
        Graph.capturing = False

    def replay(self) -> None:
        self.replayed += 1


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    guard.leave_all()
    guard.reset()
    watched_torch.watched.newest_graph = None


@pytest.fixture
def training() -> tuple[State, Any, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer, step=0)
    state.sync()
    return state, model, optimizer


def backward(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_update_counts_a_step_and_reports_it(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state, model, optimizer = training
    reported: list[Any] = []
    monkeypatch.setattr(progress_channel, "progress", lambda *args: reported.append(args))
    backward(model)
    with state.update(total=9, metrics={"loss": 1.0}):
        optimizer.step()
        assert state.changing
    assert not state.changing
    assert state.step == 1
    assert reported == [(1, 9, {"loss": 1.0})]


def test_an_update_that_fails_is_not_counted(training: Any) -> None:
    state, _, optimizer = training

    def fail() -> None:
        with state.update():
            optimizer.step()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert state.changing
    assert state.step == 0


def test_an_update_sees_what_nothing_else_does(training: Any) -> None:
    state, model, _ = training
    with state.update():
        assert state.changing
        model.weight.data.zero_()
    assert not state.changing


def test_a_replay_of_a_graph_with_a_step_is_a_change(training: Any) -> None:
    state, model, optimizer = training
    watched_torch.watch_graphs(Graph, lambda: Graph.capturing)
    forward, step = Graph(), Graph()
    forward.capture_begin()
    backward(model)
    forward.capture_end()
    step.capture_begin()
    optimizer.step()
    assert not state.changing, "a capture changes nothing"
    step.capture_end()
    forward.replay()
    assert not state.changing
    step.replay()
    assert state.changing
    assert (forward.replayed, step.replayed) == (1, 1)
    state.step += 1
    assert not state.changing


def test_gradients_that_a_graph_writes_to_are_kept(training: Any) -> None:
    state, model, _ = training
    backward(model)
    gradient = model.weight.grad
    watched_torch.watch_graphs(Graph, lambda: Graph.capturing)
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    internals(state).live.drop_gradients()
    assert model.weight.grad is gradient
    assert not gradient.any()


def test_gradients_are_freed_without_a_graph(training: Any) -> None:
    state, model, _ = training
    backward(model)
    internals(state).live.drop_gradients()
    assert model.weight.grad is None


def test_a_step_without_an_optimizer_of_torch_is_seen(training: Any) -> None:
    """Its versions tell: the objects are not those of the last step."""
    state, model, _ = training
    state.step += 1
    with torch.no_grad():
        model.weight.sub_(1)
    assert not internals(state).live.complete
    assert internals(state).live.half_changed
    assert internals(state).live.describe_change().startswith("weight has changed since")
    state.step += 1
    assert internals(state).live.complete


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_steps_of_all_kinds_of_optimizers_are_seen(options: dict[str, bool]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    state = State(model=model, optimizer=optimizer)
    state.sync()
    backward(model)
    optimizer.step()
    assert state.changing


class ClimbsFirst(torch.optim.SGD):  # type: ignore[misc, name-defined]  # torch is imported at run time
    """Changes the parameters before it calls the closure, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1)
        return super().step(closure)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("kind", "before"), [(torch.optim.SGD, False), (torch.optim.LBFGS, False), (ClimbsFirst, True)]
)
def test_gradients_of_a_closure_are_waited_for(
    kind: Any, before: bool, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption in the passes of a closure leaves a whole state, if nothing was changed before."""
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer)
    state.sync()
    changing: list[bool] = []
    waits: list[int] = []
    monkeypatch.setattr(guard, "protects", True)
    monkeypatch.setattr(devices, "wait_for_queued_work", lambda: waits.append(len(changing)))

    def closure() -> Any:
        changing.append(state.changing)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert changing[0] == before
    assert state.changing
    assert {*range(1, len(changing) + 1)} <= {*waits}, "after each call"


def test_an_interruption_in_a_closure_leaves_a_whole_state(training: Any) -> None:
    state, model, optimizer = training
    before = model.weight.detach().clone()

    def closure() -> None:
        backward(model)
        guard.request()

    with pytest.raises(RankShouldRestart):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)
    assert internals(state).live.complete


def test_a_step_that_is_compiled_is_seen_before_it_changes_anything(training: Any) -> None:
    state, model, optimizer = training
    backward(model)
    before, seen = copy.deepcopy(model.state_dict()), []
    internals(state).live.before_change = lambda: seen.append(torch.equal(model.weight, before["weight"]))
    torch.compile(optimizer.step, backend="eager")()
    assert seen == [True]
    assert state.changing
    assert not torch.equal(model.weight, before["weight"])


def test_a_step_that_is_compiled_as_one_graph_is_refused(training: Any) -> None:
    _, model, optimizer = training
    backward(model)

    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"call optimizer.step\(\) outside of what is compiled|graph_break"):
        step()
    assert torch.isfinite(model.weight).all()


def test_ddp_may_write_the_parameters_of_rank_0(training: Any) -> None:
    state, model, _ = training
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        assert internals(state).live.complete
        ddp(torch.ones(1, 2)).sum().backward()
        assert internals(state).live.complete
    finally:
        dist.destroy_process_group()


def test_parameters_may_be_set_before_the_first_step(training: Any) -> None:
    """A script may load pretrained weights after `sync`: an interruption of the first step loses nothing."""
    state, model, _ = training
    with torch.no_grad():
        model.weight.fill_(1)
    assert internals(state).live.complete
    state.commit()
    with torch.no_grad():
        model.weight.fill_(2)
    assert not internals(state).live.complete


def test_ddp_that_is_made_before_the_sync_of_a_round_may_overwrite_the_state(training: Any) -> None:
    """Rank 0 may be a new process, whose parameters are those of its script."""
    state, model, _ = training
    state.step += 1
    guard.reset()  # the next round
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        torch.nn.parallel.DistributedDataParallel(model)
        assert not internals(state).live.complete
    finally:
        dist.destroy_process_group()


def test_an_embedding_with_a_largest_norm_changes_its_weight_in_each_forward_pass() -> None:
    model = torch.nn.Embedding(4, 2, max_norm=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer)
    state.sync()
    state.step += 1
    version = model.weight._version
    model(torch.arange(4))
    assert model.weight._version > version
    assert internals(state).live.complete
    optimizer.step()
    assert not internals(state).live.complete


def test_a_copy_leaves_the_random_numbers_as_they_are(training: Any) -> None:
    """The main thread may still leave its function, and go on with them."""
    state, _, _ = training
    state.step += 1
    torch.rand(3)
    expected = torch.get_rng_state()
    internals(state).copy_live()
    assert torch.equal(torch.get_rng_state(), expected)


def test_what_ddp_writes_after_a_request_is_not_used(training: Any) -> None:
    _, model, _ = training
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        training[0].step += 1
        guard.request()
        with pytest.raises(RankShouldRestart):
            torch.nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("use", [State.commit, State.sync])
def test_nothing_is_kept_after_a_request(training: Any, use: Any) -> None:
    state, model, _ = training
    committed = internals(state).copies.newest()[1].version
    backward(model)
    guard.request()
    with pytest.raises(RankShouldRestart):
        use(state)
    assert internals(state).copies.newest()[1].version == committed


def test_no_step_is_counted_after_a_request(training: Any) -> None:
    state, model, optimizer = training
    backward(model)
    guard.request()
    with pytest.raises(RankShouldRestart):
        optimizer.step()
    with pytest.raises(RankShouldRestart):
        state.step += 1
    assert state.step == 0
    assert internals(state).live.complete


def test_lost_steps_are_reported(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank has the last counted step whole: all go back to the commit before."""
    state, model, optimizer = training
    state.commit()
    for _ in range(3):
        backward(model)
        optimizer.step()
        state.step += 1
    optimizer.step()  # interrupted before `step` was assigned
    guard.leave_all()
    state.sync()
    assert state.step == 0
    assert "goes back to step 0, the newest that is whole: 3 steps are lost" in capsys.readouterr().err


def test_a_step_that_the_device_had_not_completed_is_lost(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    state, model, optimizer = training
    state.commit()
    weight = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    state.step += 1
    guard.completed_event = SimpleNamespace(query=lambda: False)
    guard.request()
    guard.break_results(0.0)
    guard.reset()
    state.sync()
    assert state.step == 0
    assert torch.equal(model.weight, weight)
    assert "1 steps are lost" in capsys.readouterr().err

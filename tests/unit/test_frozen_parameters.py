"""Which parameters a State leaves to the script, and what happens if processes do not freeze the same ones."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from elasticjob.training.replicated.frozen_parameters import FrozenParameters  # noqa: E402


def tuned(value: float, *, freeze: bool = True) -> Any:
    """Return a model with a frozen layer, of which another one shares the weight, and a layer that is trained."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    model[0].requires_grad_(not freeze)
    return model


def test_what_is_frozen_is_left_out_under_all_its_names() -> None:
    model = tuned(1)
    state = FrozenParameters({"model": model}, keep=False).state_of("model", model)
    assert list(state) == ["1.bias", *(f"2.{name}" for name in model[2].state_dict())]


def test_by_default_all_is_kept() -> None:
    model = tuned(1)
    assert FrozenParameters({"model": model}, keep=True).state_of("model", model).keys() == model.state_dict().keys()


def test_what_is_left_out_stays_as_it_is() -> None:
    sender, receiver = tuned(1), tuned(2)
    state = FrozenParameters({"model": sender}, keep=False).state_of("model", sender)
    FrozenParameters({"model": receiver}, keep=False).restore("model", receiver, state)
    assert receiver[0].weight.eq(2).all()
    assert receiver[1].bias.eq(1).all()


def test_what_has_been_trained_is_kept_from_then_on_on_all_ranks() -> None:
    sender, receiver = tuned(1), tuned(2)
    of_sender, of_receiver = (FrozenParameters({"model": model}, keep=False) for model in (sender, receiver))
    for needs_gradient in (True, False):
        sender[0].requires_grad_(needs_gradient)
        state = of_sender.state_of("model", sender)
    assert "0.weight" in state
    of_receiver.restore("model", receiver, state)
    assert receiver[0].weight.eq(1).all()
    assert of_receiver.state_of("model", receiver).keys() == state.keys()


def test_a_process_that_freezes_less_than_the_sender_learns_what_is_missing() -> None:
    sender, receiver = tuned(1), tuned(2, freeze=False)
    state = FrozenParameters({"model": sender}, keep=False).state_of("model", sender)
    with pytest.raises(
        RuntimeError, match=r"^State\(model=\.\.\.\): 0\.bias is frozen on one rank and not on the other"
    ):
        FrozenParameters({"model": receiver}, keep=False).restore("model", receiver, state)


def test_another_model_is_refused() -> None:
    sender, receiver = torch.nn.Sequential(tuned(1), torch.nn.Linear(4, 4)), torch.nn.Sequential(tuned(2))
    state = FrozenParameters({"model": sender}, keep=False).state_of("model", sender)
    with pytest.raises(RuntimeError, match=r"1\.weight is frozen on one rank"):
        FrozenParameters({"model": receiver}, keep=False).restore("model", receiver, state)


def test_other_parts_are_kept_as_they_are() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    parts = FrozenParameters({"optimizer": optimizer}, keep=False)
    state = parts.state_of("optimizer", optimizer)
    state["param_groups"][0]["lr"] = 0.25
    parts.restore("optimizer", optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.25

"""Which parameters a State leaves to the script, and what happens if processes do not freeze the same ones."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from elasticjob.training.replicated.changes.frozen_parameters import FrozenParameters  # noqa: E402


def tuned(value: float, *, freeze: bool = True) -> Any:
    """Return a model with a frozen layer, of which another one shares the weight, and a layer that is trained."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    model[0].requires_grad_(not freeze)
    return model


class Quantized(torch.nn.Linear):  # type: ignore[misc, name-defined]  # torch is imported at run time
    """Saves more with its weight, as quantized layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(4)


def kept(model: Any, *, save_frozen: bool = False) -> FrozenParameters:
    return FrozenParameters({"model": model}, save_frozen=save_frozen)


def send(sender: FrozenParameters, model: Any, receiver: FrozenParameters, other: Any) -> None:
    receiver.restore("model", other, sender.state_of("model", model), sender.digests())


def test_what_is_frozen_is_left_out_under_all_its_names() -> None:
    model = tuned(1)
    assert list(kept(model).state_of("model", model)) == ["1.bias", *(f"2.{name}" for name in model[2].state_dict())]


def test_by_default_all_is_kept() -> None:
    model = tuned(1)
    assert kept(model, save_frozen=True).state_of("model", model).keys() == model.state_dict().keys()
    assert kept(model, save_frozen=True).digests() == {}


def test_what_is_left_out_stays_as_it_is() -> None:
    sender, receiver = tuned(1), tuned(1)
    torch.nn.init.constant_(receiver[1].bias, 2)
    weight = receiver[0].weight.data_ptr()
    send(kept(sender), sender, kept(receiver), receiver)
    assert receiver[0].weight.data_ptr() == weight
    assert receiver[1].bias.eq(1).all()


def test_what_is_saved_with_a_frozen_parameter_is_left_out_with_it() -> None:
    sender, receiver = (torch.nn.Sequential(Quantized(4, 4), torch.nn.Linear(4, 1)) for _ in range(2))
    receiver.load_state_dict(sender.state_dict(), strict=False)
    for model in (sender, receiver):
        model[0].requires_grad_(False)
    torch.nn.init.constant_(sender[1].bias, 2)
    assert list(kept(sender).state_of("model", sender)) == ["1.weight", "1.bias"]
    send(kept(sender), sender, kept(receiver), receiver)
    assert receiver[1].bias.eq(2).all()


@pytest.mark.parametrize("looks", [True, False])
def test_what_has_been_trained_is_kept_from_then_on_on_all_ranks(looks: bool) -> None:
    """`looks`: it is frozen again before the next block; else a block is made in between."""
    sender, receiver = tuned(1), tuned(2)
    of_sender, of_receiver = kept(sender), kept(receiver)
    sender[0].requires_grad_(True)
    if looks:
        of_sender.drop_trainable()
    else:
        of_sender.state_of("model", sender)
    sender[0].requires_grad_(False)
    receiver[1].bias.requires_grad_(False)  # never trained there, and part of the state
    send(of_sender, sender, of_receiver, receiver)
    assert receiver[0].weight.eq(1).all()
    assert receiver[1].bias.eq(1).all()
    assert of_receiver.state_of("model", receiver).keys() == of_sender.state_of("model", sender).keys()


def test_a_process_with_other_frozen_parameters_is_refused() -> None:
    """As after a random initialization, or if one process has trained them."""
    sender, receiver = tuned(1), tuned(2)
    of_sender, of_receiver = kept(sender), kept(receiver)
    with pytest.raises(
        RuntimeError, match=r"^State\(model=\.\.\.\): this process has another 0\.weight than the saved"
    ):
        send(of_sender, sender, of_receiver, receiver)
    assert receiver[1].bias.eq(2).all(), "nothing has been loaded"


def test_a_moving_average_is_refused_at_the_second_commit() -> None:
    average = tuned(1).requires_grad_(False)
    parts = kept(average)
    parts.digests()
    parts.digests()
    average[0].weight.data.mul_(0.999)
    with pytest.raises(RuntimeError, match=r"0\.weight needs no gradient and has changed nevertheless"):
        parts.digests()


def test_a_process_need_not_freeze_what_the_sender_does() -> None:
    sender, receiver = tuned(1), tuned(1, freeze=False)
    torch.nn.init.constant_(sender[1].bias, 2)
    for save_frozen in (False, True):
        torch.nn.init.constant_(receiver[1].bias, 3)
        of_receiver = kept(receiver, save_frozen=save_frozen)
        send(kept(sender), sender, of_receiver, receiver)
        assert receiver[1].bias.eq(2).all()
        assert of_receiver.state_of("model", receiver).keys() == receiver.state_dict().keys()


def test_a_block_that_keeps_all_is_loaded_and_the_next_one_leaves_out_again() -> None:
    sender, receiver = tuned(1), tuned(2)
    of_receiver = kept(receiver)
    send(kept(sender, save_frozen=True), sender, of_receiver, receiver)
    assert receiver[0].weight.eq(1).all()
    assert "0.weight" not in of_receiver.state_of("model", receiver)


def test_another_model_is_refused() -> None:
    sender, receiver = torch.nn.Sequential(tuned(1), torch.nn.Linear(4, 4)), torch.nn.Sequential(tuned(1))
    with pytest.raises(RuntimeError, match=r"the saved state is of another model: 1\.weight does not fit"):
        send(kept(sender), sender, kept(receiver), receiver)


def test_other_parts_are_kept_as_they_are() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    parts = FrozenParameters({"optimizer": optimizer}, save_frozen=False)
    state = parts.state_of("optimizer", optimizer)
    state["param_groups"][0]["lr"] = 0.25
    parts.restore("optimizer", optimizer, state, parts.digests())
    assert optimizer.param_groups[0]["lr"] == 0.25

"""Options of Hugging Face's Trainer that decide which data and steps there are are followed, or refused by name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
transformers: Any = pytest.importorskip("transformers")
import torch  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from elasticjob.frameworks._huggingface.fields import TrainerFields  # noqa: E402
from elasticjob.frameworks.huggingface import (  # noqa: E402
    ElasticTrainer,
    ElasticTrainerCallback,
    ElasticTrainerMixin,
)

LENGTHS = [3, 9, 1, 7, 5, 2, 8, 4, 6, 1]


class Network(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Has a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Any) -> dict[str, Any]:
        return {"loss": (self.weight - input_ids.float().mean()).square().mean()}


class Plain(transformers.Trainer):  # type: ignore[misc]  # transformers is not checked here
    """Takes the mixin behind its name."""


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": [length] * length} for length in LENGTHS]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([row["input_ids"][0] for row in rows])}


def make(folder: Path, *, kind: Any = ElasticTrainer, kept: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a trainer whose steps have four samples."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, num_train_epochs=2,
        logging_strategy="no", per_device_train_batch_size=2, **options,
    )  # fmt: skip
    callback = ElasticTrainerCallback(global_batch=4, commit_steps=10**6, **(kept or {}))
    return kind(model=Network(), args=arguments, train_dataset=rows(), data_collator=pad, callbacks=[callback])


def epoch(trainer: Any) -> list[int]:
    """Return the samples of an epoch, in the order of the training."""
    return [index for batch in trainer.get_train_dataloader().batch_sampler for index in batch]


def test_an_epoch_without_its_last_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, dataloader_drop_last=True)
    assert len(epoch(trainer)) == 8
    trainer.train()
    assert trainer.state.global_step == 4
    assert make(tmp_path).get_train_dataloader().batch_sampler.steps_per_epoch == 3


def test_a_dataset_below_one_step_is_refused_without_its_last_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataloader_drop_last=True leaves no step of 4 samples: the dataset has 3"):
        make(
            tmp_path,
            kind=lambda **given: ElasticTrainer(**{**given, "train_dataset": rows()[:3]}),
            dataloader_drop_last=True,
        )


def test_samples_of_a_step_have_similar_lengths(tmp_path: Path) -> None:
    """Each epoch has an order of its own, which does not depend on the number of ranks."""
    orders = []
    for world in (1, 2):
        trainer = make(tmp_path, train_sampling_strategy="group_by_length")
        sampler = trainer.step_batches.elastic_sampler
        sampler.ranks = type(sampler.ranks)(0, world)
        order = sampler.order().indices(range(10))
        assert sorted(order) == list(range(10))
        lengths = [LENGTHS[index] for index in order]
        assert lengths[0] == max(LENGTHS), "the longest one first: memory that does not suffice shows at once"
        assert all(max(step) - min(step) <= 6 for step in (lengths[1:4], lengths[4:8]))
        sampler.set_epoch(1)
        orders.append((order, sampler.order().indices(range(10))))
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_the_order_of_the_dataset_a_seed_of_the_data_and_an_order_of_the_users_own(tmp_path: Path) -> None:
    assert epoch(make(tmp_path, train_sampling_strategy="sequential"))[:8] == list(range(8))
    usual = epoch(make(tmp_path))
    assert usual == epoch(make(tmp_path, data_seed=0))
    assert usual != epoch(make(tmp_path, data_seed=1)) == epoch(make(tmp_path, kept={"seed": 1}))
    own = make(tmp_path, kept={"order": lambda _: list(range(9, -1, -1))})
    assert epoch(own)[:4] == [9, 8, 7, 6]


def test_workers_are_started_as_the_option_says(tmp_path: Path) -> None:
    loader = make(tmp_path, dataloader_multiprocessing_context="spawn", dataloader_num_workers=1).get_train_dataloader()
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def own(method: str) -> type:
    """Return a trainer with a method of its own."""

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(Plain, self), method)(*args, **kwargs)

    return type("Mine", (ElasticTrainerMixin, type("Base", (Plain,), {method: override})), {})


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .*: leave it out, and set per_device_train_batch_"),
        ({"train_sampling_strategy": "batch_rebalance"}, '"batch_rebalance" deals .*: use "group_by_length"'),
        ({"dataloader_in_order": False}, "dataloader_in_order=False .*: leave it out"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True .*: leave it out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True .*: leave it out"),
        ({"average_tokens_across_devices": False}, "it needs average_tokens_across_devices=True"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["x"]}, "use the optimizer without layerwise"),
        ({"kind": own("_get_train_sampler")}, r"Base._get_train_sampler would be ignored.*order=\.\.\."),
        ({"kind": own("get_train_dataloader")}, "Base.get_train_dataloader would be ignored: remove it. pass the data"),
        (
            {"kept": {"order": lambda _: []}, "train_sampling_strategy": "sequential"},
            r"train_sampling_strategy='sequential' has an order: leave out order=\.\.\.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "option",
)
def test_what_cannot_be_followed_is_refused(options: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=refusal):
        make(tmp_path, **options)


def test_a_checkpoint_is_refused_because_the_callback_restores(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out resume_from_checkpoint"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_a_loss_without_its_weight_is_refused(tmp_path: Path) -> None:
    class Mine(ElasticTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs)["loss"]

    with pytest.raises(RuntimeError, match=r"Mine.compute_loss does not call that of ElasticTrainerMixin"):
        make(tmp_path, kind=Mine).train()


class Exporting(transformers.TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not checked here
    """Exports what it was created with."""

    def __init__(self, limit: int = 1, seen: Any = 0) -> None:
        self.limit, self.seen, self.own = limit, seen, "own"

    def state(self) -> dict[str, Any]:
        return {"args": {"limit": self.limit}, "attributes": {"seen": self.seen}}


def fields(*callbacks: Any) -> TrainerFields:
    found = TrainerFields()
    found.begin_round(transformers.TrainerState(), list(callbacks))
    return found


def test_callbacks_get_what_those_of_another_rank_have_exported() -> None:
    """Several of a class differ by their order. What is not exported stays."""
    stopping = transformers.EarlyStoppingCallback(3)
    stopping.early_stopping_patience_counter = 2
    state = fields(Exporting(7, 1), stopping, Exporting(8, [2])).state_dict()
    new = (Exporting(), transformers.EarlyStoppingCallback(3), Exporting(), Exporting())
    new[0].own = "kept"
    loaded = fields(*new)
    loaded.load_state_dict(state)
    assert [(each.limit, each.seen) for each in (new[0], new[2], new[3])] == [(7, 1), (8, [2]), (1, 0)]
    assert (new[1].early_stopping_patience_counter, new[0].own) == (2, "kept")
    assert loaded.state_dict() != fields(*new[:3]).state_dict()


def test_a_callback_whose_state_is_no_json_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"the state of callback Exporting cannot be kept .*: let its state.* numbers"):
        fields(Exporting(seen=torch.zeros(1))).state_dict()


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is not checked here
    """Ends a round before the optimizer's step, and counts evaluations."""

    def __init__(self, step: int) -> None:
        self.step, self.evaluated_at = step, list[int]()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluated_at.append(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def test_it_evaluates_at_the_start_of_the_training_and_not_of_each_round(tmp_path: Path) -> None:
    model, kept, found = Network(), ElasticTrainerCallback(global_batch=4, commit_steps=10**6), []
    for stop in (0, 2, 100):
        interrupt = Interrupt(stop)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            num_train_epochs=1, per_device_train_batch_size=2, eval_on_start=True, log_level="error",
        )  # fmt: skip
        trainer = ElasticTrainer(
            model=model, args=arguments, train_dataset=rows(), eval_dataset=rows()[:2], data_collator=pad,
            callbacks=[kept, interrupt],
        )  # fmt: skip
        with suppress(InterruptedError):
            trainer.train()
        found.append(interrupt.evaluated_at)
    assert found == [[0], [0], []], "the first step was done in the second round"

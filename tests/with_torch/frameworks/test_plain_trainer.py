"""A trainer gets the callback that saves at a planned end, unless it or one of its callbacks is of elasticjob."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob.frameworks import plain_trainer

pytestmark = pytest.mark.torch


class PlainTrainer:
    def __init__(self, *callbacks: object) -> None:
        self.args = SimpleNamespace(save_strategy="steps", output_dir="/nowhere")
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))

    def add_callback(self, callback: object) -> None:
        self.callback_handler.callbacks.append(callback)


def of_elasticjob(name: str, *bases: type) -> Any:
    return type(name, bases, {"__module__": "elasticjob.frameworks.huggingface"})


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imports elasticjob inside of a function, which its modules do not show."""
    monkeypatch.setattr(plain_trainer, "uses_elasticjob", lambda: False)


@pytest.mark.parametrize(
    ("trainer", "added"),
    [
        (PlainTrainer(), 1),
        (of_elasticjob("ElasticTrainer", PlainTrainer)(), 0),
        (PlainTrainer(of_elasticjob("ElasticCallback")()), 0),
    ],
    ids=["plain", "a trainer of elasticjob", "a callback of elasticjob"],
)
def test_what_is_of_elasticjob_gets_nothing_added(trainer: PlainTrainer, added: int) -> None:
    plain_trainer.add_callback(trainer)
    found = [c for c in trainer.callback_handler.callbacks if isinstance(c, plain_trainer.SavingStop)]
    assert len(found) == added
    if not added:
        assert plain_trainer.checkpoint_of_job(trainer) is None


def test_each_training_of_a_script_goes_on_from_its_own_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(plain_trainer, "begun_trainings", 0)
    for step, mark in ((9, "job training 1\n"), (5, "job training 2\n"), (8, "other training 2\n")):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "elasticjob-job").write_text(mark)
    trainer = PlainTrainer()
    trainer.args.output_dir = str(tmp_path)
    plain_trainer.add_callback(trainer)
    found = []
    for _ in range(3):
        plain_trainer.count_training()
        found.append(plain_trainer.checkpoint_of_job(trainer))
    assert found == [str(tmp_path / "checkpoint-9"), str(tmp_path / "checkpoint-5"), None]

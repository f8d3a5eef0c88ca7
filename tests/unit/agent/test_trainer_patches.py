"""What is patched in Lightning and transformers' Trainer, with stand-ins of their classes."""

from __future__ import annotations

import os
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.in_workers import lightning_status, lightning_stop, sitecustomize, trainers
from elasticjob._runtime.agent.start_workers.in_workers.lightning_world import fail_at_once, follow_round
from elasticjob._runtime.agent.start_workers.in_workers.one_world import SeparateWorldError

RANK = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
OWN = str(os.getpid())


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of two pods with two workers each."""
    monkeypatch.setenv("ELASTICJOB_WORLD", " ".join(f"{name}={value}" for name, value in RANK.items()))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)


def module_with(**members: Any) -> ModuleType:
    module = ModuleType("stand_in")
    module.__dict__.update(members)
    return module


class Connector:
    """Lightning's, as far as it decides on numbers."""

    def _check_device_config_and_set_final_flags(self, devices: object, num_nodes: object, *others: object) -> None:
        self.numbers = (devices, num_nodes, *others)


@pytest.mark.parametrize(
    ("trains", "given", "numbers"),
    [
        ("", (2, 1), (2, 2)),
        ("", ("auto", 7), (2, 2)),
        ("", (2, 1, "of an older Lightning"), (2, 2, "of an older Lightning")),
        (OWN, (2, 4), (2, 2)),
        (OWN, (1, 1), (1, 1)),
        (OWN, ("auto", 1), ("auto", 1)),
        ("1", (2, 4), (2, 4)),
    ],
    ids=[
        "one node", "all devices", "more arguments", "a second training", "a test on one device", "a test on all",
        "below a rank",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["_AcceleratorConnector", "_Connector"])
def test_lightning_has_the_numbers_of_the_round_unless_one_node_is_meant(
    name: str, trains: str, given: tuple[Any, ...], numbers: object, rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trains:
        monkeypatch.setenv("ELASTICJOB_TRAINS", trains)
    kind = type(name, (Connector,), {})
    follow_round(module_with(**{name: kind}))
    connector = kind()
    connector._check_device_config_and_set_final_flags(*given)
    assert connector.numbers == numbers


def test_a_lightning_that_checks_no_settings_starts(rank: None) -> None:
    environment = type("TorchElasticEnvironment", (), {})
    fail_at_once(module_with(TorchElasticEnvironment=environment))
    assert not hasattr(environment, "validate_settings")
    fail_at_once(module_with())


def test_a_package_that_cannot_be_patched_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sitecustomize.PATCHES, "stand_in", ("lightning_world.fail_at_once",))
    no_class = 1
    sitecustomize.apply_patches("stand_in", module_with(TorchElasticEnvironment=Sealed(no_class)))
    assert "stand_in is not patched by lightning_world.fail_at_once" in capsys.readouterr().err


class Sealed(int):
    """Something with Lightning's method that takes no attribute."""

    __slots__ = ()

    def validate_settings(self) -> None: ...


def test_another_number_of_devices_than_that_of_the_workers_is_an_error(rank: None) -> None:
    class TorchElasticEnvironment:
        def world_size(self) -> int:
            return 4

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            self.checked = (num_devices, num_nodes)

    fail_at_once(module_with(TorchElasticEnvironment=TorchElasticEnvironment))
    environment = TorchElasticEnvironment()
    environment.validate_settings(2, 2)
    assert environment.checked == (2, 2)
    with pytest.raises(SeparateWorldError, match=r"set spec\.nprocPerNode: 3"):
        environment.validate_settings(3, 2)


class Callback:
    """Lightning's base class of callbacks, of a package that a process without elasticjob has."""


class Trainer:
    """Lightning's."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []


def test_a_trainer_with_the_callback_that_shows_progress_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:1/status")
    monkeypatch.setitem(sys.modules, "stand_in", module_with(Callback=Callback))
    monkeypatch.setattr(lightning_status, "framework", lambda name: None)
    trainer = type("Trainer", (Trainer,), {})
    lightning_status.show_progress(module_with(Trainer=trainer))
    made = trainer()
    assert [isinstance(callback, Callback) for callback in made.callbacks] == [True]
    assert [type(callback) for callback in pickle.loads(pickle.dumps(made.callbacks))] == [Callback]  # noqa: S301


class Lightning:
    """elasticjob.frameworks.plain_lightning, with a checkpoint of the job unless the script names one."""

    def __init__(self) -> None:
        self.goes_on = False
        self.saved: list[object] = []

    def add_lightning_stop(self, trainer: Trainer, package: object, total: object) -> bool:
        trainer.callbacks.append("stops")
        return True

    def begin_training(self, trainer: object, checkpoint: object) -> None:
        self.goes_on = checkpoint is None

    def note_checkpoint(self, trainer: object, path: object) -> None:
        self.saved.append(path)

    def checkpoint_to_load(self, trainer: object) -> str | None:
        return "of the job" if self.goes_on else None


class CheckpointConnector:
    """Lightning's connector of checkpoints."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._user_managed = trainer, False
        self.loaded: object = None

    def resume_start(self, checkpoint_path: object = None, weights_only: bool | None = None) -> None:
        self.loaded = (checkpoint_path, weights_only)


class FittingTrainer(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(fn="fit")
        self.ckpt_path: str | None = None
        self._checkpoint_connector = CheckpointConnector(self)

    def fit(self, model: object, *data: object, ckpt_path: object = None) -> object:
        given = data[3] if len(data) > 3 else ckpt_path
        self._checkpoint_connector.resume_start(given, weights_only=None)
        return self._checkpoint_connector.loaded

    def save_checkpoint(self, filepath: object, weights_only: bool | None = None) -> None: ...


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> tuple[Lightning, Any]:
    """Return what stands for plain_lightning, and a patched Trainer of Lightning."""
    found = Lightning()
    for module in (lightning_status, lightning_stop):
        monkeypatch.setattr(module, "framework", lambda name: found)
    connector = type("_CheckpointConnector", (CheckpointConnector,), {})
    connectors = module_with(_CheckpointConnector=connector)
    monkeypatch.setitem(sys.modules, "stand_in.trainer.connectors.checkpoint_connector", connectors)
    monkeypatch.setitem(sys.modules, "stand_in", module_with(Callback=Callback))
    kind: Any = type("Trainer", (FittingTrainer,), {})
    module = module_with(Trainer=kind)
    module.__name__ = "stand_in.trainer.trainer"
    lightning_status.show_progress(module)
    lightning_stop.go_on(module)
    trainer = kind()
    trainer._checkpoint_connector = connector(trainer)
    return found, trainer


def test_lightning_goes_on_from_the_jobs_checkpoint_unless_the_script_names_one(
    lightning: tuple[Lightning, Any],
) -> None:
    found, trainer = lightning
    assert trainer.callbacks == ["stops"]
    assert trainer.fit("model") == ("of the job", False)
    assert trainer.fit("model", ckpt_path="mine") == ("mine", None)
    assert trainer.fit("model", 1, 2, 3, "mine") == ("mine", None)
    trainer.ckpt_path = "of the fit before"
    assert trainer.fit("model") == ("of the job", False)
    trainer._checkpoint_connector._user_managed = True
    assert trainer.fit("model") == (None, None)
    found.goes_on, trainer.state.fn = True, "test"
    assert trainer.fit("model", ckpt_path="best") == ("best", None)


def test_complete_checkpoints_of_lightning_are_noted(lightning: tuple[Lightning, Any]) -> None:
    found, trainer = lightning
    trainer.save_checkpoint("whole")
    trainer.save_checkpoint("weights", True)
    trainer.save_checkpoint("weights", weights_only=True)
    assert found.saved == ["whole"]


class Framework:
    """elasticjob.frameworks.plain_trainer, with a checkpoint of the job."""

    def __init__(self) -> None:
        self.trainings = 0
        self.trainers: list[object] = []

    def add_callback(self, trainer: object) -> None:
        self.trainers.append(trainer)

    def count_training(self) -> None:
        self.trainings += 1

    def checkpoint_of_job(self, trainer: object) -> str:
        return f"of training {self.trainings}"


class HuggingFaceTrainer:
    def __init__(self, model: str) -> None:
        self.model = model

    def train(self, resume_from_checkpoint: Any = None, trial: object = None) -> tuple[Any, object]:
        return resume_from_checkpoint, trial


def extended() -> Any:
    """Make transformers' Trainer in a worker."""
    kind: Any = type("Trainer", (HuggingFaceTrainer,), {})
    trainers.extend_trainer(module_with(Trainer=kind))
    return kind("model")


def test_a_training_from_the_scripts_own_checkpoint_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = Framework()
    monkeypatch.setattr(trainers, "framework", lambda name: framework)
    trainer = extended()
    assert framework.trainers == [trainer]
    assert trainer.train("of the script") == ("of the script", None)
    assert trainer.train() == ("of training 2", None)
    assert trainer.train(resume_from_checkpoint=False, trial="t") == ("of training 3", "t")


@pytest.mark.parametrize("wanted", [True, False], ids=["elasticjob is another one", "the job does not want it"])
def test_a_trainer_stays_as_it_is(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not wanted:
        monkeypatch.setenv(trainers.TRAINER_INTEGRATION, "None")
    framework = None if wanted else Framework()
    monkeypatch.setattr(trainers, "framework", lambda name: framework)
    assert extended().train("x") == ("x", None)
    assert extended().train() == (None, None)
    assert framework is None or not framework.trainers

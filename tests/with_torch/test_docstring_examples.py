"""The docstrings of the names that scripts import have examples, and these run."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import elasticjob
from elasticjob.training import progress_channel

FRAMEWORKS = {
    "ElasticLightningCallback": ("lightning", "lightning"),
    "ElasticTrainerCallback": ("huggingface", "transformers"),
    "begin_accelerate_round": ("accelerate_rounds", "accelerate"),
}
"""Public name: module of `elasticjob.frameworks`, and the package that it needs."""
INPROCESS = ("CallWrapper", "State", "Wrapper")


COMMON = {"elasticjob": elasticjob, "torch": torch, "dist": dist, "sys": sys}
"""What an example may use without an import."""


def run_example(name: str, public: Callable[..., Any]) -> None:
    """Run the examples of a docstring; fail if it has none."""
    names = {**vars(importlib.import_module(public.__module__)), **COMMON, name: public}
    example = doctest.DocTestParser().get_doctest(public.__doc__ or "", names, name, None, None)
    assert example.examples, f"the docstring of {name} has no example"
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(example, out=output.append).failed
    assert not failed, "".join(output)


@pytest.fixture(autouse=True)
def _own_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is of no other test."""
    monkeypatch.setattr(progress_channel, "channel", progress_channel.ProgressChannel())


@pytest.mark.parametrize("name", elasticjob.__all__)
def test_examples_of_public_names_run(name: str) -> None:
    run_example(name, getattr(elasticjob, name))


@pytest.mark.parametrize("name", INPROCESS)
def test_examples_of_the_in_process_restart_run(name: str) -> None:
    run_example(name, getattr(importlib.import_module("elasticjob.inprocess"), name))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_examples_of_frameworks_run(name: str) -> None:
    module, package = FRAMEWORKS[name]
    pytest.importorskip(package)
    run_example(name, getattr(importlib.import_module(f"elasticjob.frameworks.{module}"), name))

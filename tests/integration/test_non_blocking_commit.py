"""`State.commit(non_blocking=True)`: training goes on while the state is copied, and each copy is of one moment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
PROGRAM = Path(__file__).parents[1] / "support/training/non_blocking_commits.py"
CHANGED = (
    "State.commit(non_blocking=True): model.0.weight was changed before it was copied, and not by a step of an "
    "optimizer of this State: the commit before this one is kept. Write state.commit()"
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])}
    found: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, PROGRAM], env=environ, timeout=200))
    return found


def test_a_forward_pass_goes_on_meanwhile_and_a_step_of_an_optimizer_waits(results: dict[str, Any]) -> None:
    assert results["trains meanwhile"] == {
        "meanwhile": -1, "after the step": 1, "loaded": 1, "same": True, "changed": True,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["in place", "one element", "by data", "then committed"])
def test_what_else_changes_a_parameter_is_an_error_and_the_commit_before_is_kept(
    results: dict[str, Any], how: str
) -> None:
    """A commit that raises counts nevertheless, as it does on the other ranks."""
    assert results[how] == {"error": CHANGED, "kept": 1, "same": True, "counted": how == "then committed"}


def test_weights_that_are_swapped_and_back_are_an_error(results: dict[str, Any]) -> None:
    assert results["swapped and back"] == {"error": CHANGED}


def test_only_large_tensors_that_an_optimizer_changes_are_copied_late(results: dict[str, Any]) -> None:
    late = ["exp_avg of model.0.weight", "exp_avg_sq of model.0.weight", "model.0.weight"]
    assert results["copied late"] == {"late": late, "all": True}


def test_an_interrupted_wait_does_not_end_the_copy(results: dict[str, Any]) -> None:
    assert results["interrupted wait"] == {"interrupted": True, "kept": 1, "same": True}


def test_a_parameter_whose_memory_was_replaced_is_copied_as_it_was(results: dict[str, Any]) -> None:
    assert results["replaced"] == {"error": "", "kept": 2, "same": True, "counted": False}


def test_a_copy_that_fails_is_an_error_of_the_next_step(results: dict[str, Any]) -> None:
    assert results["copy fails"] == {"error": "division by zero", "changing": False}


def test_another_state_and_the_end_of_the_process_wait_for_the_copy(results: dict[str, Any]) -> None:
    assert (results["another state"], results["process ends"]) == ({"kept": 1}, {"kept": 2, "copies": [1, 2]})


def test_where_no_thread_copies_nothing_waits_for_one(results: dict[str, Any]) -> None:
    """In a fork, without another thread, and in a State that another one has replaced."""
    found = [results[name] for name in ("fork", "no threads", "earlier state")]
    assert found == [{"exit code": 7}, {"kept": 1, "interrupted": 1}, {"kept": 1, "began": False}]


def test_ranks_that_go_back_still_know_what_they_have_alike(results: dict[str, Any]) -> None:
    assert results["alike"] == {"own": [2, 2], "alike": True}


def test_a_planned_end_commits_although_a_commit_before_it_has_failed(results: dict[str, Any]) -> None:
    assert results["planned end"] == {"kept": 1, "same": True}


def test_a_model_without_optimizer_is_copied_at_once(results: dict[str, Any]) -> None:
    assert results["without optimizer"] == {"same": True}


DIES_WHILE_IT_COMMITS = """
import hashlib, os, signal, sys
import torch, torch.distributed as dist, elasticjob

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Linear(4096, 2048)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elasticjob.State(model=model, optimizer=optimizer, step=0)
state.sync()
print(f"begins after step {state.step}", flush=True)
while state.step < 12:
    model(torch.randn(1, 4096)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    state.commit(non_blocking=True)
    if state.step == 6 and sys.argv[1:] and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("digest", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
dist.destroy_process_group()
"""


def test_a_process_that_dies_while_it_commits_goes_back_to_the_commit_before(tmp_path: Path) -> None:
    texts = []
    for arguments in ([], [str(tmp_path / "died")]):
        job = manifest([*script(tmp_path, DIES_WHILE_IT_COMMITS), *arguments], failurePolicy={"maxRestarts": 1})
        with LocalRun(job, tmp_path) as run:
            assert run.exit_code(200) == 0, run.text
        texts.append(run.text)
    begins = [re.findall(r"begins after step (\d+)", text) for text in texts]
    assert begins[0] == ["0"]
    assert begins[1] in (["0", "5"], ["0", "6"])
    assert len({digest for text in texts for digest in re.findall(r"digest (\w+)", text)}) == 1

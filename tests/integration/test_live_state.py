"""`elasticjob.State` in processes that survive the end of a round: real torch and gloo, three ranks, no agent.

One program runs all scenarios (`support.training.live_state_ranks`), since torch takes seconds to import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support/training/live_state_ranks.py"

DOES_NOT_FIT = "write numbers, text, lists, dicts and tensors, or give the type state_dict and load_state_dict"
SHARDED = (
    "it is sharded over ranks, and a State holds the same state for all ranks: "
    "pass its model to an elasticjob.ShardedState"
)
REFUSED = {
    "numpy scalar": "TypeError: State: best: numpy scalars cannot be part of a State: write value.item()",
    "numpy array": (
        "TypeError: State: seen['x'][0]: numpy arrays cannot be part of a State: write torch.from_numpy(array)"
    ),
    "late numpy scalar": "TypeError: State: best: numpy scalars cannot be part of a State: write value.item()",
    "object": f"TypeError: State: best: objects of type object cannot be part of a State: {DOES_NOT_FIT}",
    "class": "TypeError: State: model: the class Linear cannot be part of a State: pass an object of it",
    "data loader": f"TypeError: State: loader: objects of type DataLoader cannot be part of a State: {DOES_NOT_FIT}",
    "set": f"TypeError: State: seen: objects of type set cannot be part of a State: {DOES_NOT_FIT}",
    "key": "TypeError: State: seen: 1.5 cannot be a key in a State: write keys as integers or text, such as str(key)",
    "inside an object": (
        "TypeError: State: tracker.state_dict()['best'][0]: numpy scalars cannot be part of a State: write value.item()"
    ),
    "named tuple inside an object": (
        "TypeError: State: tracker.state_dict()['best'][0]: a Pair comes back as a plain tuple: write tuple(value)"
    ),
    "defaultdict inside an object": (
        "TypeError: State: tracker.state_dict()['best']['x']: "
        "a defaultdict comes back as a plain dict: write dict(value)"
    ),
    "sparse": (
        "TypeError: State: mask: sparse and quantized tensors cannot be part of a State: "
        "write tensor.to_dense() or tensor.dequantize()"
    ),
    "quantized": (
        "TypeError: State: mask: sparse and quantized tensors cannot be part of a State: "
        "write tensor.to_dense() or tensor.dequantize()"
    ),
    "meta": (
        "TypeError: State: mask: tensors on the meta device have no content: "
        "create the State once the tensor has been materialized"
    ),
    "commit": "ValueError: State(commit=...): State has an attribute 'commit': use another name, such as my_commit",
    "changing": (
        "ValueError: State(changing=...): State has an attribute 'changing': use another name, such as my_changing"
    ),
    "private": "ValueError: State(_live=...): use a name that does not begin with an underscore",
    "step": "ValueError: State: step: -1 is negative",
    "late step": "TypeError: State: step: numpy scalars cannot be part of a State: write value.item()",
    "position of a rank": (
        "TypeError: State(sampler=...): PerRankSampler saves the position of one rank, and a State holds the same "
        "state for all ranks: count the samples of all ranks in a plain value, such as State(samples=0), "
        "and skip them after sync"
    ),
    "loader of torchdata": (
        "TypeError: State(loader=...): DerivedLoader saves the position of one rank, and a State holds the same "
        "state for all ranks: count the samples of all ranks in a plain value, such as State(samples=0), "
        "and skip them after sync"
    ),
    "prepared loader of torchdata": (
        "TypeError: State(loader=...): PreparedLoader saves the position of one rank, and a State holds the same "
        "state for all ranks: count the samples of all ranks in a plain value, such as State(samples=0), "
        "and skip them after sync"
    ),
    "trained tensor": (
        "TypeError: State: seen: a tensor that is trained comes back as one that no optimizer knows: "
        "put it into a torch.nn.Module"
    ),
    "subclass of dict": "TypeError: State: seen: a defaultdict comes back as a plain dict: write dict(value)",
    "named tuple": "TypeError: State: seen: a Pair comes back as a plain tuple: write tuple(value)",
    "without a shape": (
        "TypeError: State(model=...): it has parameters without a shape: call it once with an example before"
    ),
    "wrapped optimizer": (
        "TypeError: State(optimizer=...): WrappedOptimizer does not say when it begins a step: "
        "pass the optimizer that it wraps"
    ),
    "minutes": "ValueError: State(save_minutes=-5): write minutes above 0, or leave it out",
    "minutes without a path": (
        "ValueError: State(save_minutes=...) needs the file to which to save: State(path=..., save_minutes=...)"
    ),
    "result of a computation": "",
    "distributed sampler": "",
    "all kinds": "",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rounds")
    output = subprocess.check_output(
        [sys.executable, str(PROGRAM), str(folder)], text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent / 'agent'}:{TESTS}"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(results: dict[str, Any], case: str) -> None:
    assert results["refused"][case] == REFUSED[case]


def test_sharded_models_are_refused(results: dict[str, Any]) -> None:
    for fsdp2, fsdp1, tensor, late, optimizer, divided in results["sharded"]:
        assert fsdp2 == f"TypeError: State(model=...): parameter 0.weight (DTensor): {SHARDED}"
        flat = "parameter 0._fsdp_wrapped_module._flat_param (FullyShardedDataParallel)"
        assert fsdp1 == f"TypeError: State(model=...): {flat}: {SHARDED}"
        assert tensor == f"TypeError: State: shard: {SHARDED}"
        assert optimizer == f"TypeError: State(optimizer=...): SGD: {SHARDED}"
        assert divided == f"TypeError: State(optimizer=...): ZeroRedundancyOptimizer: {SHARDED}"
        assert late == f"TypeError: State: late.state_dict()['weight']: {SHARDED}"


def test_an_uninterrupted_run_has_the_same_model_and_its_own_random_states_on_each_rank(
    results: dict[str, Any],
) -> None:
    ranks = results["uninterrupted"]
    assert len({rank["bits"] for rank in ranks}) == 1
    assert len({rank["random"] for rank in ranks}) == 3


INTERRUPTIONS = {
    "forward": ([[2, False], [2, False], [2, False]], [{}, {}, {}]),
    # The others had the gradients of rank 1, and completed the step.
    "backward": ([[3, False], [2, False], [3, False]], [{"send": 1}, {"receive": 1, "_load": 1}, {}]),
    "optimizer": ([[3, False], [2, True], [3, False]], [{"send": 1}, {"receive": 1, "_load": 1}, {}]),
}


@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_an_interrupted_step_is_done_again_with_the_same_bits(results: dict[str, Any], place: str) -> None:
    """`_load`: only rank 1 loads something into its objects, and only if the others are a step ahead."""
    ranks, (interrupted, calls) = results[place], INTERRUPTIONS[place]
    assert [rank.pop("interrupted") for rank in ranks] == interrupted
    assert [rank.pop("calls") for rank in ranks] == calls
    assert ranks == results["uninterrupted"]


def test_gradients_of_an_interrupted_backward_pass_are_dropped(results: dict[str, Any]) -> None:
    assert all(all(rank) for rank in results["gradients"])


def test_a_joiner_gets_the_live_state_and_the_others_load_nothing(results: dict[str, Any]) -> None:
    ranks = results["joiner"]
    assert [rank.pop("calls") for rank in ranks] == [{"send": 1}, {}, {"receive": 1, "_load": 1}]
    assert ranks[0]["values"].startswith("[3, 24, 3, ")
    assert ranks[0] == ranks[1] == ranks[2], "also the random states, which were alike on the other ranks"


def test_a_joiner_whose_process_stays_receives_in_place(results: dict[str, Any]) -> None:
    """One gets the state from a rank of its own, two by a broadcast: with the same bits."""
    sent, received = {"send": 1}, {"receive_pieces": 1, "_load": 1}
    for name, calls in (("joiner stays", [sent, {}, received]), ("joiners stay", [sent, received, received])):
        ranks = results[name]
        assert [rank.pop("calls") for rank in ranks] == calls
        assert [rank.pop("in place") for rank in ranks] == [True] * 3
        assert (len({rank.pop("random") for rank in ranks}) == 1) is (name == "joiner stays"), "if two ranks agree"
        assert ranks[0] == ranks[1] == ranks[2]
        assert ranks[0]["values"].startswith("[3, 24, 3, ")


def test_a_joiner_gets_a_new_seed_if_the_random_states_of_the_others_differ(results: dict[str, Any]) -> None:
    first, second, joiner = results["joiner random"]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert joiner[1] not in (joiner[0], first[1], second[1])


def test_frozen_parameters_are_neither_kept_nor_sent(results: dict[str, Any]) -> None:
    first, second, joiner = results["fine-tuning"]
    assert first["equal"] == second["equal"]
    assert first["equal"][:2] == joiner["equal"]
    assert [step for step, _ in first["equal"]] == [1, 2, 3]
    assert all(size < 256 * 256 * 4 for size in (*first["sent"], *joiner["sent"])), "without the frozen matrix"
    assert joiner["error"].startswith("State(model=...): this process has another 0.weight than the saved state")
    assert not first["error"] + second["error"]


def test_a_rollback_that_was_committed_wins(results: dict[str, Any]) -> None:
    assert results["rollback"] == [[2, True]] * 3


def test_a_node_that_was_cut_off_and_committed_more_often_loses(results: dict[str, Any]) -> None:
    assert results["cut off"] == [3, 3, 3]


def test_without_any_complete_state_sync_fails_on_all_ranks(results: dict[str, Any]) -> None:
    error = "every rank was interrupted inside a step, and there is no copy: restart the training"
    assert results["all half changed"] == [error] * 3


def test_all_ranks_go_back_to_the_last_commit_with_the_same_bits(results: dict[str, Any]) -> None:
    assert results["all half changed with a copy"] == [[2, digest] for digest in results["uninterrupted"]]


def test_new_processes_continue_from_the_nodes_memory_with_the_same_bits(results: dict[str, Any]) -> None:
    ranks = results["new process"]
    assert [rank.pop("calls") for rank in ranks] == [{"_load": 1}] * 3, "nothing is sent"
    assert ranks == results["uninterrupted"]


def test_a_commit_contains_the_effect_of_queued_work(results: dict[str, Any]) -> None:
    assert results["queued"] == {"committed": 5.0}


def test_a_scheduler_keeps_its_counter(results: dict[str, Any]) -> None:
    assert results["milestones"] == {"loaded": "Counter", "interrupted": "Counter"}


def test_each_rank_of_a_node_broadcasts_with_its_own_gpu(results: dict[str, Any]) -> None:
    assert results["devices"] == {
        "of the group": "cuda:5",
        "of the model": "cuda:5",
        "set by the script": "cuda:5",
        "never set": "cuda:3",
        "one visible GPU": "cuda:0",
        "restored": "cuda:3 on cuda:3",
    }


def test_a_change_is_under_way_from_the_optimizer_to_the_assignment_of_step(results: dict[str, Any]) -> None:
    assert results["sections"]["seen"] == [
        [False, False],
        [True, True],  # after two optimizer steps
        [False, False],  # after `step += 1`
        [False, False],  # after a step of the optimizer and a commit
        [False, False],  # another State has taken over in the middle of a change
        [False, True, True],  # it alone watches the optimizer
        [False, False],
    ]


def test_a_planned_end_commits_the_state_that_was_created_or_synchronized_last(results: dict[str, Any]) -> None:
    """The third round has dropped the callbacks of the function, and no State is synchronized before its end."""
    assert results["planned ends"]["committed"] == ["second", "-", "first", "-", "-", "second", "-"]


def test_values_that_were_changed_in_place(results: dict[str, Any]) -> None:
    """A list returns to what it was at the commit. A tensor does not, so the copy in memory is loaded."""
    assert results["in place"] == {"table": {"x": [1]}, "complete": False, "mask": [0.0, 0.0]}


def test_a_plain_tensor_comes_back_on_its_device(results: dict[str, Any]) -> None:
    assert results["device of a value"] == {
        "alone": "tensor(..., device='meta', size=(2,))",
        "inside": "{'x': [tensor(..., device='meta', size=(2,))]}",
    }


def test_what_a_forward_pass_has_changed_is_undone(results: dict[str, Any]) -> None:
    """Extra state, and a buffer of another shape. A gradient scaler that is not enabled has nothing to undo."""
    assert results["forward passes"] == {"calls": [1], "seen": [1.0]}


def test_a_file_of_version_0_1_0_is_loaded_and_any_newer_state_is_saved_over_it(results: dict[str, Any]) -> None:
    assert results["old file"] == {"loaded": [1000, 4], "saved": 7}


def test_the_first_sync_of_a_process_changes_nothing_if_there_is_no_state(results: dict[str, Any]) -> None:
    assert results["first sync"] == {"step": 7, "best": 3, "lr": 0.5}

"""`elasticjob.ShardedState` with FSDP2 and HSDP over gloo: between ranks, and under real agents that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.local.run import LocalRun, manifest

pytestmark = pytest.mark.torch
TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support/training/sharded_state_ranks.py"
EXAMPLE = TESTS.parent / "examples" / "sharded" / "train.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rounds")
    output = subprocess.check_output(
        [sys.executable, str(PROGRAM), str(folder)], text=True, timeout=280,
        env=environment(PYTHONPATH=f"{TESTS.parent / 'agent'}:{TESTS}"),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(output)
    return found


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP"])
def test_the_state_is_laid_out_for_four_then_three_then_four_ranks(results: dict[str, Any], kind: str) -> None:
    """A rank is lost, and later a new one joins; the ranks of two processes change places."""
    ranks = results[kind]
    assert [len(rounds) for rounds in ranks] == [3, 3, 2, 3]
    for rank in range(4):
        for number, (restored, _, losses, _, files) in zip(
            (0, 1, 2) if rank != 2 else (0, 2), ranks[rank], strict=True
        ):
            assert restored is (number > 0)
            assert losses == pytest.approx(results["reference"][rank][3 * number : 3 * number + 3], abs=2e-6)
            assert files == [], "nothing is read from a disk"
    ends = [[end for _, _, _, end, _ in ranks[rank]] for rank in (0, 1, 3)]
    begins = [[begin for _, begin, _, _, _ in ranks[rank]] for rank in (0, 1, 3)]
    assert ends[0] == ends[1] == ends[2]
    assert begins[0] == begins[1] == begins[2]
    assert begins[0][1:] == ends[0][:-1], "the same bits in another layout"
    assert ranks[2][1][1] == begins[0][2]
    assert begins[0][2]["tensors"] == 24, "parameters and optimizer states"
    assert begins[0][2]["values"] == [6, list(range(6)), [6.0] * 3, [pytest.approx(0.1 * 0.9**6)]]


LOST = {
    "one lost": [[True, 2, True, []], [True, 2, True, []], None, [True, 2, True, []]],
    "every other lost": [[True, 2, True, []], None, [True, 2, True, []], None],
    "node of two lost": [[True, 2, True, []], [True, 2, True, []], None, None],
    "neighbors lost": [
        [False, 0, False, ["training does not continue from memory: shards 1 of 4 of step 2 are in no pod's memory"]],
        None,
        None,
        [False, 0, False, []],
    ],
}


@pytest.mark.parametrize("case", LOST)
def test_each_shard_survives_the_loss_of_its_node(results: dict[str, Any], case: str) -> None:
    assert results[case] == LOST[case]


def test_a_new_layout_is_copied_before_any_step(results: dict[str, Any]) -> None:
    assert results["lost one after the other"] == [[True, 2, True], [], [], [True, 2, True]]


def test_a_commit_that_one_rank_has_not_completed_does_not_count(results: dict[str, Any]) -> None:
    assert results["torn commit"] == [[True, 2, True, 3]] * 4


def test_a_node_that_is_lost_before_its_copy_is_made_costs_one_step(results: dict[str, Any]) -> None:
    error = "RuntimeError: Connection closed by peer"
    assert results["copies not made"] == [
        [True, 2, True, error],
        [True, 2, True, error],
        [error],
        [True, 2, True, error],
    ]


def test_a_copy_that_never_ends_does_not_stop_the_next_round(results: dict[str, Any]) -> None:
    assert results["copy that never ends"] == [[True, 3, True]] * 4


def test_a_planned_end_loses_no_step(results: dict[str, Any]) -> None:
    assert results["planned end"] == [[True, 2, True], [True, 2, True], [True, 2, True], []]


def test_values_of_one_rank_stay_what_they_were_at_the_same_world_size(results: dict[str, Any]) -> None:
    """Buffers that are not the same on all ranks, and random states."""
    for rank, (before, after) in enumerate(results["own values"]):
        assert before == after
        assert before[0] == [rank + 1.0] * 2


@pytest.mark.parametrize(("case", "name"), [("own buffer", "model.seen"), ("own value", "a tensor among the values")])
def test_what_differs_between_ranks_and_is_not_sharded_does_not_move_to_another_rank(
    results: dict[str, Any], case: str, name: str
) -> None:
    error = (
        f"ValueError: ShardedState: {name} is no DTensor and differs between ranks, and the state was committed by 4 "
        "ranks in another layout than that of these 3"
    )
    for rank, (first, *second) in enumerate(results[case]):
        assert first == ""
        assert [text.partition(":")[0] for text in second] == ([] if rank == 2 else ["ValueError"])
        assert all(text.startswith(error) for text in second), second


def test_statistics_of_normalization_layers_are_those_of_any_rank(results: dict[str, Any]) -> None:
    assert results["own statistics"] == [["", ""], ["", ""], [""], ["", ""]]


def test_fsdp_over_tensor_parallelism_is_laid_out_for_other_meshes(results: dict[str, Any]) -> None:
    """2x2 ranks, then 1x2, 4x1 and 2x2 again; five rows are divided unevenly among two ranks."""
    ranks = results["FSDP and tensor parallelism"]
    rounds = [[rank[number] for rank in ranks] for number in range(4)]
    assert rounds[1][2:] == [None, None]
    previous: Any = None
    for number, found in enumerate(rounds):
        present = [rank for rank in found if rank is not None]
        assert all(rank == present[0] for rank in present)
        restored, begin, losses, previous_end = present[0]
        assert restored is (number > 0)
        assert losses == pytest.approx(results["tensor parallel reference"][0][2 * number : 2 * number + 2], abs=2e-6)
        assert previous is None or begin == previous
        previous = previous_end


def test_a_joiner_has_random_states_of_its_own_unless_all_others_are_alike(results: dict[str, Any]) -> None:
    ranks = results["joiner random"]
    assert all(before == now for before, now in ranks[:3])
    assert len({now for *_, now in ranks}) == 4
    assert len({now for *_, now in results["joiner random alike"]}) == 1


def test_ranks_that_commit_different_steps_get_an_error(results: dict[str, Any]) -> None:
    error = "RuntimeError: ShardedState: the ranks have committed different steps: call commit on all ranks"
    assert results["different commits"] == [error] * 4


def test_a_state_of_another_model_is_refused(results: dict[str, Any]) -> None:
    missing = "KeyError: 'ShardedState: model.more.weight is not in the committed state: the model has changed'"
    for first, second in results["another model"]:
        assert first == missing
        assert second.startswith("ValueError: Size mismatch between saved torch.Size([5, 7])")


REFUSED = {
    "FSDP1": "ShardedState(model=...): 0: FullyShardedDataParallel (FSDP1) cannot be kept: use fully_shard (FSDP2)",
    "meta": (
        "ShardedState(model=...): weight: tensors on the meta device have no content: "
        "create the ShardedState once they are materialized"
    ),
    "sum of the ranks": (
        "ShardedState(model=...): kept: a DTensor with a Partial placement has no content of its own: redistribute it"
    ),
    "ShardedTensor": "ShardedState(model=...): kept: ShardedTensor cannot be kept: use DTensor",
    "other optimizer": (
        "ShardedState(optimizer=...): parameter 0 of group 0 is in no model of this ShardedState: "
        "pass the model, and create the optimizer after fully_shard"
    ),
    "extra state": (
        "ShardedState(model=...): ExtraState: a module with get_extra_state cannot be kept: "
        "register its state as buffers"
    ),
    "object": (
        "ShardedState: best: objects of type object cannot be part of a State: "
        "write numbers, text, lists, dicts and tensors, or give the type state_dict and load_state_dict"
    ),
    "name": ("ShardedState(commit=...): ShardedState has an attribute 'commit': use another name, such as my_commit"),
    "option of State": (
        "ShardedState(save_minutes=...): only State has it; write files with torch.distributed.checkpoint"
    ),
    "shard as a value": (
        "ShardedState: shard: it is sharded over ranks, and a State holds the same state for all ranks: "
        "pass its model to an elasticjob.ShardedState"
    ),
    "no sync": "ShardedState.commit: call sync first, at the start of each round",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_sharded_state_cannot_keep_is_refused_by_name(results: dict[str, Any], case: str) -> None:
    assert [rank[case].partition(": ")[2] for rank in results["refused"]] == [REFUSED[case]] * 4


# ---- under agents --------------------------------------------------------------------------------------------------


def job(*arguments: str) -> dict[str, object]:
    preload = ["torch", "torch._dynamo", "torch.distributed.fsdp", "elasticjob.training.sharded.sharded_state"]
    command = [sys.executable, str(EXAMPLE), "--steps=100000", "--step-delay=0.02", *arguments]
    return manifest(command, replicas=4, elasticPolicy={"minReplicas": 3, "maxReplicas": 4}, preload=preload)


def losses(text: str) -> dict[int, list[float]]:
    """Return all losses that ranks printed, by step."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"step=(\d+) loss=(\S+) world=\d rank=\d$", text, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    return found


def uninterrupted(steps: int) -> dict[int, list[float]]:
    """Return the losses of a run of the example in one process."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    command = [sys.executable, str(EXAMPLE), f"--steps={steps}"]
    env = environment(PYTHONPATH=TESTS.parent / "agent", **alone)
    return losses(subprocess.check_output(command, text=True, timeout=300, env=env))


def begun(run: LocalRun, world: int) -> tuple[int, dict[int, int]]:
    """Wait for a round of this world size; return the step after which it begins, and process ids by rank."""
    line = rf"rank=(\d) world={world} begins after step=(\d+) restored=(\w+) pid=(\d+)"
    found = [run.wait_for(line, 200) for _ in range(world)]
    assert len({match[2] for match in found}) == 1
    return int(found[0][2]), {int(match[1]): int(match[4]) for match in found}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def committed(text: str) -> int:
    """Return the last step of the last round that any rank has printed, after its commit."""
    return max(int(step) for step in re.findall(r"step=(\d+) loss", text[text.rindex(" begins after ") :]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="FSDP2", marks=pytest.mark.deep),
        pytest.param(["--replicas=2"], id="HSDP", marks=pytest.mark.deep),
        pytest.param(["--in-process"], id="in process"),
    ],
)
def test_any_node_can_be_killed_at_any_step(tmp_path: Path, arguments: list[str]) -> None:
    """4 nodes, 3 when one is killed, 4 when its successor joins; twice. And a worker is killed, whose agent stays."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    with LocalRun(job(*arguments), tmp_path) as run:
        step, pids = begun(run, 4)
        first, survivors = pids, set(pids.values())
        for _ in range(2):
            run.wait_for(rf"step={step + draw.randint(3, 20)} .* world=4 rank={draw.randrange(4)}$", 100)
            rank = draw.randrange(4)
            os.kill(parent(pids[rank]), signal.SIGKILL)
            run.wait_for("round .* ends: ")  # a survivor may be first with its broken collective
            survivors.discard(pids[rank])
            before = committed(run.text)
            step, _ = begun(run, 3)
            assert before - 1 <= step <= before + 1, run.text
            step, pids = begun(run, 4)
            last = re.findall(r"ends after step (\d+)", run.text)[-1]
            assert step == int(last), "a node that joins costs no step"
        run.wait_for(rf"step={step + draw.randint(3, 20)} ", 100)
        os.kill(pids[2], signal.SIGKILL)
        run.wait_for("round .* ends: ")
        before = committed(run.text)
        step, pids = begun(run, 4)
        assert before - 1 <= step <= before + 1, run.text
        run.wait_for(rf"step={step + 5} ", 100)
        run.signal(signal.SIGINT)
        assert run.exit_code() == 130
    found = losses(run.text)
    expected = uninterrupted(max(found))
    begins = {int(step) for step in re.findall(r"begins after step=(\d+)", run.text)}
    assert set(expected) - set(found) <= begins, "no step is left out; one may have been committed and not printed"
    for step, values in found.items():
        assert values == [pytest.approx(expected[step][0], abs=2e-3)] * len(values), f"step {step}"
    if "--in-process" in arguments:
        assert set(pids.values()) & set(first.values()), "processes that survive are the same"
    else:
        assert not set(pids.values()) & set(first.values())

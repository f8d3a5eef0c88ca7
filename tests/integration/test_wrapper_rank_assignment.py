"""Each rule of `rank_assignment` in real processes: which rank takes which place once a process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.common.child_process import ChildProcess
from support.training.wrapper_ranks import Ranks, trains

pytestmark = pytest.mark.torch
pytest.importorskip("torch.distributed")

PLACES = """
class SayPlace(Initialize):
    def __call__(self, state):
        active = f"active {state.active_rank} of {state.active_world_size}"
        say("iteration", state.iteration, "rank", state.rank, "of", state.world_size, active)

@Wrapper(rank_assignment=RULE, initialize=SayPlace(), last_call_wait=timedelta(0))
def train(call: CallWrapper):
    rank = join(call)
    if call.iteration == 0:
        threading.Event().wait()  # until a rank is killed
    return rank

say("returned", train())
"""

Places = tuple[tuple[int, ...], int]
"""Initial ranks in the order of their ranks in one iteration, and how many of these are active."""


def takes_its_place(process: ChildProcess, initial_rank: int, iteration: int, places: Places) -> int | None:
    """Wait until a process has its place in an iteration, and trains if it is active; return its active rank."""
    order, active = places
    rank = order.index(initial_rank)
    active_rank = rank if rank < active else None
    process.wait_for(f"^iteration {iteration} rank {rank} of {len(order)} active {active_rank} of {active}$")
    if active_rank is not None:
        trains(process, rank, active, iteration)
    return active_rank


@pytest.mark.parametrize(
    ("rule", "hosts", "killed", "before", "after"),
    [
        ("FillGaps()", "", 0, ((0, 1, 2), 3), ((2, 1), 2)),
        ("StableRanks(max_active_world_size=2)", "", 0, ((0, 1, 2), 2), ((2, 1), 2)),
        (  # the spare of its own rack replaces a lost rank, not the first spare
            "Tree(Layer(key=lambda member: member.domain(1), max_ranks=1))",
            "rack1/node0 rack1/node1 rack2/node2 rack2/node3",
            2, ((0, 2, 1, 3), 2), ((0, 3, 1), 2),
        ),
        ("WholeNodes(ranks_per_node=2)", "node0 node1 node0 node1", 2, ((0, 2, 1, 3), 4), ((1, 3, 0), 2)),
    ],
    ids=["FillGaps", "StableRanks", "Tree", "WholeNodes"],
)  # fmt: skip
def test_the_remaining_ranks_take_the_places_of_the_rule(
    ranks: Ranks, tmp_path: Path, rule: str, hosts: str, killed: int, before: Places, after: Places
) -> None:
    with ranks(tmp_path, f"RULE = {rule}\n{PLACES}", len(before[0]), hosts.split()) as processes:
        for initial_rank, process in enumerate(processes):
            takes_its_place(process, initial_rank, 0, before)
        processes[killed].process.kill()
        for initial_rank in after[0]:
            active_rank = takes_its_place(processes[initial_rank], initial_rank, 1, after)
            processes[initial_rank].wait_for(f"^returned {active_rank}$")
            assert processes[initial_rank].exit_code() == 0

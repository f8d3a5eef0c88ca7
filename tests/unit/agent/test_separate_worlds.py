"""Which processes below a worker belong to another world, by their environment, and which of them check that."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.workers.separate_worlds import separate_rank
from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS

WORLD = "LOCAL_RANK=1 RANK=3 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=5"
OTHER = {"ELASTICJOB_WORLD": WORLD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "PYTHONPATH": "."}
PATCHED = {**OTHER, "PYTHONPATH": f".:{CODE_ROOT}/{IN_WORKERS}"}
TRAIN = ["/venv/bin/python3", "-u", "train.py"]


@pytest.mark.parametrize(
    ("environment", "argv"),
    [
        (OTHER, TRAIN),
        ({**OTHER, "RANK": "3"}, TRAIN),
        ({**OTHER, "WORLD_SIZE": "8"}, ["python", "-W", "ignore", "-m", "x"]),
        (PATCHED, ["python", "-I", "train.py"]),
        (PATCHED, ["python", "-uS", "-X", "dev", "train.py"]),
    ],
)
def test_a_rank_of_another_world_whose_python_checks_nothing(environment: dict[str, str], argv: list[str]) -> None:
    found = separate_rank(environment, argv)
    assert found is not None
    assert (found.local_rank, found.port, found.assigned) == (1, 29500, "rank 3 of 8")
    assert f"as rank {environment['RANK']} of {environment['WORLD_SIZE']}" in found.message


@pytest.mark.parametrize(
    ("environment", "argv"),
    [
        ({**OTHER, "RANK": "3", "WORLD_SIZE": "8"}, TRAIN),
        ({**OTHER, "ALLOW_SEPARATE_WORLDS": "1"}, TRAIN),
        ({**OTHER, "ELASTICJOB_TRAINS": "7"}, TRAIN),
        ({**OTHER, "MASTER_PORT": ""}, TRAIN),
        ({name: value for name, value in OTHER.items() if name != "ELASTICJOB_WORLD"}, TRAIN),
        ({}, []),
        (PATCHED, TRAIN),
        (PATCHED, ["python", "-W", "Ignore", "-X", "SEI", "train.py"]),
        (PATCHED, ["nvidia-smi"]),
    ],
)
def test_a_process_of_the_round_or_one_that_checks_itself(environment: dict[str, str], argv: list[str]) -> None:
    assert separate_rank(environment, argv) is None

"""Commands of a JobSet's and of HyperPod's pods: what says which node a pod is goes away."""

from __future__ import annotations

import pytest

from elasticjob.convert.parts.node_command import plain_command

ENV = {"N": "4", "ARGS": "--a --b", "MASTER_ADDR": "job-0"}
PLAIN = "torchrun --nproc-per-node=2 train.py --lr 1"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["bash", "-c", "torchrun --node_rank=$RANK --rdzv-id 7 --nproc-per-node=2 train.py --lr 1"], PLAIN),
        (["sh", "-xc", "exec torchrun \\\n --master_addr $MASTER_ADDR --nproc-per-node=2 train.py --lr 1\n"], PLAIN),
        (["bash", "-c", "torchrun --nproc-per-node=${N} train.py"], "torchrun --nproc-per-node=4 train.py"),
        (["bash", "-c", "torchrun --standalone -m pkg.train --node-rank 3"],
         "torchrun --standalone -m pkg.train --node-rank 3"),
        (["bash", "-c", 'torchrun train.py "a b"'], "torchrun train.py a b"),
        (["hyperpodrun", "--server-port", "8080", "--nproc-per-node=2", "train.py", "--lr", "1"], PLAIN),
        (["bash", "-c", "hyperpodrun --server-host=a --nproc-per-node=2 train.py --lr 1"], PLAIN),
    ],
)  # fmt: skip
def test_a_script_that_only_starts_torchrun_becomes_a_plain_torchrun(command: list[str], expected: str) -> None:
    container, _ = plain_command({"name": "a", "command": command[:1], "args": command[1:]}, ENV)
    assert container["name"] == "a"
    assert "args" not in container
    assert " ".join(container["command"]) == expected


@pytest.mark.parametrize(
    "script",
    [
        "pip install x && torchrun train.py",
        "torchrun train.py > log",
        "torchrun train.py --seed=$RANDOM",
        "torchrun train.py $ARGS",
        "torchrun train.py '$N'",
        "torchrun train.py 'open",
        "python train.py",
        "cd a; torchrun train.py",
        "torchrun train.py --data *.txt",
        "",
    ],
)
def test_any_other_script_stays(script: str) -> None:
    container = {"command": ["bash", "-c", script]}
    assert plain_command(container, ENV) == (container, [])


@pytest.mark.parametrize("command", [["torchrun", "train.py"], ["python", "train.py"], ["bash", "run.sh"], [], [1]])
def test_other_commands_stay(command: list[str]) -> None:
    assert plain_command({"command": command}, ENV) == ({"command": command}, [])


def test_the_options_that_only_hyperpodrun_has_are_returned() -> None:
    _, lost = plain_command({"command": ["hyperpodrun", "--server-port=1", "--rdzv-id=2", "train.py"]}, {})
    assert lost == ["--server-port"]

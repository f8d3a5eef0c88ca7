"""Commands of training containers: what is read from torchrun's options, and what is left of the command."""

from __future__ import annotations

import pytest

from elasticjob._runtime.contract.commands.reserved_variables import RESERVED_VARIABLES
from elasticjob.convert.draft import JobDraft
from elasticjob.convert.parts.fields import InputObject, JsonObject, Notes
from elasticjob.convert.parts.pod_template import read_template
from elasticjob.convert.parts.training_command import TrainingCommand, read_command
from elasticjob.convert.parts.workers import put_workers


def read(command: list[str], args: list[str] | None = None, **env: str) -> tuple[TrainingCommand, list[str]]:
    notes = Notes()
    return read_command(command, args, env, "c", notes), [str(note) for note in notes.items]


@pytest.mark.parametrize(
    ("words", "options", "left"),
    [
        ("python train.py --nnodes=2", {}, "python train.py --nnodes=2"),
        ("torchrun train.py --nproc-per-node=4", {}, "torchrun train.py --nproc-per-node=4"),
        ("torchrun --nproc_per_node 4 train.py --lr 1", {"nproc-per-node": "4"}, "torchrun train.py --lr 1"),
        ("/opt/bin/torchrun --nproc-per=gpu train.py", {"nproc-per-node": "gpu"}, "/opt/bin/torchrun train.py"),
        ("python -u -m torch.distributed.run --nnodes=1:4 --max-restarts=3 -m pkg.train",
         {"nnodes": "1:4", "max-restarts": "3"}, "python -u -m torch.distributed.run --module pkg.train"),
        ("torchrun --tee 3 --role=a -r 1 --standalone train.py", {},
         "torchrun --tee=3 --role=a --redirects=1 train.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py --x", {"nproc-per-node": "2"},
         "python -m torch.distributed.launch train.py --x"),
        ("python -m torch.distributed.launch --use-env --nnodes=2 train.py", {"nnodes": "2"},
         "python -m torch.distributed.launch --use-env train.py"),
        ("torchrun --nproc-per-node=$(N) --node-rank=$(RANK) --max-restarts=$(R) train.py --x $(N)",
         {"nproc-per-node": "$(N)", "max-restarts": "$(R)"}, "torchrun --nproc-per-node=$(N) train.py --x $(N)"),
        ("torchrun --nproc-per-node=$(GPUS) train.py", {"nproc-per-node": "8"}, "torchrun train.py"),
        ("torchrun --no-such-option train.py", {}, "torchrun --no-such-option train.py"),
        ("torchrun --numa-binding=node train.py", {}, "torchrun train.py"),
    ],
)  # fmt: skip
def test_torchruns_options(words: str, options: dict[str, str], left: str) -> None:
    found, _ = read(words.split(), GPUS="8")
    assert (found.options, found.command, found.args) == (options, left.split(), None)
    assert found.uses_torchrun == ("train.py --nnodes" not in words)


def test_an_unchanged_command_keeps_its_args() -> None:
    found, notes = read(["torchrun"], ["--tee=3", "train.py"])
    assert (found.command, found.args, notes) == (["torchrun"], ["--tee=3", "train.py"], [])
    changed, _ = read(["torchrun"], ["--nnodes=2", "train.py"])
    assert (changed.command, changed.args) == (["torchrun", "train.py"], None)


@pytest.mark.parametrize(
    ("option", "note"),
    [
        ("--rdzv-endpoint=a:1", "--rdzv-endpoint is removed, it has no effect: the coordinator of the job runs the"),
        ("--master-port=$(MASTER_PORT)", "--master-port is removed, it has no effect: each round has a store"),
        ("--nnodes=$(NODES)", "--nnodes is removed, it has no effect: spec.replicas and spec.elasticPolicy"),
        ("--numa-binding=node", "--numa-binding is removed, it is not supported: the agent binds no processors"),
        ("--no-such-option", "torchrun's options are not read: torchrun: unrecognized arguments"),
    ],
)
def test_options_without_effect_are_noted(option: str, note: str) -> None:
    _, notes = read(["torchrun", option, "train.py"])
    assert [line for line in notes if line.startswith(f"c.command: {note}")], notes


@pytest.mark.parametrize(
    ("script", "options", "uses_torchrun"),
    [
        ("python train.py --nproc-per-node=3", {}, False),
        ("torchrun --nproc-per-node=3 train.py", {"nproc-per-node": "3"}, True),
        ("cd /app && exec torchrun --nnodes 1:4 --nproc_per_node \"$N\" train.py",
         {"nnodes": "1:4", "nproc-per-node": "8"}, True),
        ("python3 -u -m torch.distributed.run \\\n --nproc_per_node=${N} \\\n train.py", {"nproc-per-node": "8"}, True),
        ("torchrun --nproc_per_node \\\n 3 train.py", {"nproc-per-node": "3"}, True),
        ("set -e; /usr/bin/torchrun --nproc-per-node=$(nproc) train.py", {}, True),
        ("echo torchrun_is_nice", {}, False),
    ],
)  # fmt: skip
def test_torchrun_in_a_shell(script: str, options: dict[str, str], uses_torchrun: bool) -> None:
    for command, args in ((["bash", "-c", script], None), (["/bin/sh", "-e", "-c"], [script])):
        found, _ = read(command, args, N="8")
        assert (found.options, found.uses_torchrun) == (options, uses_torchrun)
        assert (found.command, found.args) == (command, args)


def test_a_number_that_only_the_shell_knows_is_noted() -> None:
    _, notes = read(["bash", "-c", "torchrun --nproc_per_node=$N train.py"])
    assert notes == [
        "c.command: --nproc-per-node=$N is known only in the container: set spec.nprocPerNode to its value"
    ]


def test_a_script_of_several_commands_stays_as_it_is() -> None:
    """A command with a launcher runs once in its pod, as before."""
    script = "pip install x\ntorchrun --nproc_per_node=2 train.py\n"
    command, notes = read(["bash", "-c", script])
    assert (command.command, notes) == (["bash", "-c", script], [])


# ---- the number of workers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "field", "gpus", "written", "note"),
    [
        ("torchrun train.py", None, 4, None, ""),
        ("torchrun train.py", "auto", 4, None, ""),
        ("torchrun train.py", "4", 4, 4, ""),
        ("torchrun --nproc-per-node=2 train.py", "4", 4, 2, ""),
        ("torchrun --nproc-per-node=auto train.py", None, 4, None, ""),
        ("torchrun train.py", None, 0, None, "torchrun's auto is one worker for each processor"),
        ("torchrun train.py", "cpu", 0, "cpu", ""),
        ("python train.py", None, 0, None, ""),
        ("python train.py", None, 1, None, ""),
        ("python train.py", None, 4, 1, "it runs once in each pod"),
        ("python train.py", "1", 4, 1, "it runs once in each pod"),
        ("python train.py", "4", 4, 4, "elasticjob starts the command 4 times in each pod"),
        ("deepspeed train.py", "4", 4, 4, ""),
        ("accelerate launch --num_processes=8 train.py", None, 4, None, ""),
        ("axolotl train config.yml", None, 4, None, ""),
        ("llamafactory-cli train config.yml", "4", 4, 4, ""),
        ("mpirun -np 8 python train.py", "4", 4, 1, "mpirun starts ranks of its own, which the job does not restart"),
        ("env srun train.py", "4", 4, 1, "srun starts ranks of its own"),
        ("colossalai run train.py", "4", 4, 1, "colossalai starts workers of its own"),
        ("hyperpodrun --nproc_per_node=8 --server-port 1 train.py", None, 4, 8, "--server-port without effect"),
        (
            "ft_launcher --ft-cfg_path a --nproc_per_node=8 train.py",
            None,
            4,
            8,
            "torchrun is in its place; --ft-cfg-path",
        ),
    ],
)
def test_workers(command: str, field: str | None, gpus: int, written: int | str | None, note: str) -> None:
    notes = Notes()
    container: JsonObject = {"name": "pytorch", "command": command.split()}
    container["resources"] = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    trained = read_template(InputObject({"spec": {"containers": [container]}}, "t"), "pytorch", notes)
    draft = JobDraft(InputObject({"name": "toy"}, "metadata"), notes)
    put_workers(draft, trained, field, "spec.nprocPerNode", notes)
    assert draft.get("nprocPerNode") == written
    assert [note in str(line) for line in notes.items] == ([True] if note else []), notes


def test_the_time_out_of_ft_launcher_is_that_of_the_hang_policy() -> None:
    words = "ft_launcher --nnodes=2 --ft-rank-heartbeat-timeout=900.5 --ft-safety-factor 2 train.py --ft-own x"
    found, notes = read(words.split())
    assert found.command == ["torchrun", "train.py", "--ft-own", "x"]
    assert found.progress_timeout == 901
    assert "--ft-rank-heartbeat-timeout is spec.hangPolicy.progressTimeoutSeconds" in notes[0]
    assert "--ft-safety-factor without effect" in notes[0]


# ---- environment variables -------------------------------------------------------------------------------------------


def test_only_reserved_variables_and_those_of_fields_are_left_out() -> None:
    names = [*sorted(RESERVED_VARIABLES), "ELASTICJOB_INDEX", "PET_NPROC_PER_NODE", "PET_LOG_DIR", "NCCL_DEBUG"]
    container = {"name": "pytorch", "command": ["t"], "env": [{"name": name, "value": "1"} for name in names]}
    notes = Notes()
    spec = {"containers": [container], "initContainers": [{**container, "name": "first"}]}
    template = read_template(InputObject({"spec": spec}, "t"), "pytorch", notes).template["spec"]
    for converted in (*template["containers"], *template["initContainers"]):
        assert [item["name"] for item in converted["env"]] == ["PET_LOG_DIR", "NCCL_DEBUG"]
    assert len(notes.items) == 2 * (len(names) - 2)

"""Workers per node: the same number, or the same error, from the operator and from `elasticjob run`."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob._runtime.local.manifest.manifest import ManifestError, parse_local_job
from elasticjob_operator.model.job.spec import SpecError, parse_spec
from support.local.run import manifest

GPUS = {"limits": {"nvidia.com/gpu": "2"}}
MIG = {"limits": {"nvidia.com/mig-1g.5gb": 3}}
CLAIM = {"claims": [{"name": "gpus"}]}
CPUS = {"requests": {"cpu": "500m"}, "limits": {"cpu": "2500m"}}
UNKNOWN = "want a number from 1 to 64, or auto, gpu, cpu"
NOT_COUNTED = "set nprocPerNode to a number (the devices of a resource claim cannot be counted)"
NO_GPU = "container requests no GPU: add resources.limits, for example nvidia.com/gpu: 1"


@pytest.mark.parametrize(
    ("written", "command", "resources", "expected"),
    [
        (None, "python t.py", {}, 1),
        (None, "python t.py", GPUS, 2),
        ("auto", "python t.py", MIG, 3),
        ("auto", "python t.py", {"limits": {"amd.com/gpu": 4, "cpu": 8}}, 4),
        ("auto", "python t.py", CPUS, 1),
        ("gpu", "python t.py", GPUS, 2),
        ("gpu", "python t.py", MIG, 3),
        ("gpu", "python t.py", {"requests": {"amd.com/gpu": 4}}, 4),
        ("gpu", "python t.py", CPUS, f"nprocPerNode is gpu, and the trainer {NO_GPU}"),
        (8, "python t.py", CLAIM, 8),
        ("auto", "python t.py", CLAIM, 1),
        ("auto", "python t.py", {**CLAIM, **GPUS}, 2),
        (
            "gpu",
            "python t.py",
            CLAIM,
            NOT_COUNTED,
        ),
        ("cpu", "python t.py", CPUS, 3),
        ("cpu", "python t.py", GPUS, 1),
        (4, "python t.py", GPUS, 4),
        (None, "torchrun t.py --nproc-per-node=4", {}, 1),
        (None, "torchrun --nproc-per-node=3 t.py", {}, 3),
        ("auto", "torchrun --nproc_per_node 3 t.py", GPUS, 3),
        (None, "python -u -m torch.distributed.run --nproc-per-node=3 t.py", {}, 3),
        (None, "python -m torch.distributed.launch --use-env --nproc-per-node=3 t.py", {}, 3),
        (None, "torchrun --nproc-per-node=auto t.py", GPUS, 2),
        (None, "torchrun --nproc-per-node=gpu t.py", MIG, 3),
        (None, "torchrun --nproc-per-node=cpu t.py", CPUS, 3),
        (3, "torchrun --nproc-per-node=3 t.py", {}, 3),
        (3, "torchrun --nproc-per-node=auto t.py", {}, 3),
        ("gpu", "torchrun --nproc-per-node=2 t.py", GPUS, 2),
        (2, "torchrun --nproc-per-node=3 t.py", {}, "nprocPerNode is 2 and the command has --nproc-per-node=3"),
        ("gpu", "torchrun --nproc-per-node=3 t.py", GPUS, "nprocPerNode is 2 and the command has --nproc-per-node=3"),
        (None, "torchrun --nproc-per-node=gpu t.py", CPUS, f"--nproc-per-node is gpu, and the trainer {NO_GPU}"),
        (None, "torchrun --nproc-per-node=xpu t.py", {}, f"--nproc-per-node 'xpu': {UNKNOWN}"),
        (None, "torchrun --nproc-per-node=65 t.py", {}, f"--nproc-per-node '65': {UNKNOWN}"),
        (None, "torchrun --virtual-local-rank t.py", {}, "--virtual-local-rank is not supported"),
        (None, "torchrun --unknown t.py", {}, "torchrun: unrecognized arguments: --unknown"),
        (None, "torchrun --nproc-per-node=$(N) t.py", {}, 1),
        (None, "torchrun --master-port $(PORT) t.py", GPUS, 2),
        (2, "torchrun --nproc-per-node=$(N) t.py", {}, 2),
        (None, "torchrun --no t.py", {}, 1),
        (None, "bash -c torchrun", {}, 1),
    ],
)
def test_operator_and_local_run_agree(
    written: Any, command: str, resources: dict[str, Any], expected: int | str
) -> None:
    raw: Any = manifest(command.split(), **({} if written is None else {"nprocPerNode": written}))
    raw["spec"]["template"]["spec"]["containers"][0]["resources"] = resources
    if isinstance(expected, int):
        assert parse_spec(raw["spec"]).nproc_per_node == expected
        assert parse_local_job(raw).nproc_per_node == expected
        return
    with pytest.raises(SpecError) as of_operator:
        parse_spec(raw["spec"])
    with pytest.raises(ManifestError) as of_run:
        parse_local_job(raw)
    assert expected in str(of_operator.value)
    assert str(of_run.value) == f"spec: {of_operator.value}"


@pytest.mark.parametrize(
    ("written", "command", "expected"),
    [
        (None, "torchrun --nproc-per-node=3 --numa-binding=node t.py", (3, False)),
        (None, "torchrun --nproc-per-node=gpu t.py", (1, True)),
        (None, "torchrun --unknown t.py", (1, True)),
        (None, "bash run.sh", (1, True)),
        (2, "torchrun t.py", (2, False)),
    ],
)
def test_a_torchrun_of_the_users_reads_its_options_itself(
    written: int | None, command: str, expected: tuple[int, bool]
) -> None:
    spec: Any = manifest(command.split(), rendezvous={"backend": "c10d"}, nprocPerNode=written or "auto")["spec"]
    parsed = parse_spec(spec)
    assert (parsed.nproc_per_node, parsed.nproc_is_default) == expected


def test_a_variable_of_the_template_counts_as_torchrun_reads_it() -> None:
    raw: Any = manifest(["torchrun", "$(OPTION)", "t.py"])
    trainer = raw["spec"]["template"]["spec"]["containers"][0]
    trainer["env"] = [{"name": "PET_NPROC_PER_NODE", "value": "3"}, {"name": "OPTION", "value": "--standalone"}]
    assert (parse_spec(raw["spec"]).nproc_per_node, parse_local_job(raw).nproc_per_node) == (3, 3)
    trainer["env"][1]["value"] = "--nproc-per-node=4"
    assert (parse_spec(raw["spec"]).nproc_per_node, parse_local_job(raw).nproc_per_node) == (4, 4)
    raw["spec"]["rendezvous"] = {"backend": "c10d"}
    trainer["env"][1]["value"] = "--standalone"
    assert (parse_spec(raw["spec"]).nproc_per_node, parse_local_job(raw).nproc_per_node) == (3, 3)

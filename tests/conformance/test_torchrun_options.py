"""elasticjob reads torchrun's command line by the rules of the installed torch's own parser."""

from __future__ import annotations

import os
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.contract.commands.torchrun_command import (
    TORCHRUN_OPTIONS,
    CommandError,
    OptionUse,
    parse_torchrun,
)

pytestmark = pytest.mark.torch

LINES = """
train.py
train.py --lr 1
train.py --nproc-per-node 3
train.py -- --role x
train.py -m 2 -r 3
--nproc-per-node 3 train.py
--nproc-per-node=3 train.py a b
--nproc_per_node 3 train.py
--nproc_per_node=3 train.py
--nproc-per-n 3 train.py
--nproc=3 train.py
--nproc 3 train.py
--nproc_per=gpu train.py
--nproc-per-node auto train.py
--nnodes 2:4 --nproc-per-node=2 train.py --nnodes 1
--nnodes=1 train.py
--nn 2 train.py
--n 2 train.py
--no-python ./run.sh a
--no_python ./run.sh
--no-p ./run.sh a
--no-py ./run.sh -m
--no ./run.sh
--node-rank 1 train.py
--node_rank=x train.py
--node 1 train.py
--standalone train.py
--standal train.py a
--stand train.py
--sta train.py
--st train.py
--standalone=1 train.py
-m pkg.train x
-mpkg.train x
--module pkg.train -m
--mod pkg.train
--mo pkg.train
--m pkg.train
-mr 3 pkg.train
-r 3 train.py
-r3 train.py
-r=3 train.py
-r 0:1,1:2 -t 3 train.py
-t3 -m pkg.train
--tee=0:3 train.py
--tee 3 train.py
--te 3 train.py
--redirects 3 train.py --tee 1
--redir=1 train.py
--log-dir /l --log_line_prefix_template "[${rank}] " train.py
--log-line '${hostname}: ' train.py
--log /l train.py
--log-d /l train.py
--local-ranks-filter 0,1 train.py
--local_ranks_filter=0 train.py
--local-addr h train.py
--local 0 train.py
--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id 7 --rdzv-conf a=1,b=2 train.py
--rdzv_backend=c10d --rdzv_endpoint=h:1 --rdzv_id=7 --rdzv_conf=a=1 train.py
--rdzv-b c10d train.py
--rdzv c10d train.py
--max-restarts 3 train.py
--max_restarts=3 train.py
--max 3 train.py
--max-restarts x train.py
--max-restarts -1 train.py
--monitor-interval 0.5 train.py
--monitor-interval 5s train.py
--start-method fork train.py
--start-method thread train.py
--event-log-handler console train.py
--event console train.py
--role trainer train.py
--role=trainer train.py
--role -x train.py
--role
--role x
--master-addr h --master-port 1 train.py
--master_addr=h --master_port=1 train.py
--master-port x train.py
--master h train.py
--run-path /abs/train.py a
--run_path /abs/train.py
--run /abs/train.py
--unknown train.py
--unknown=1 train.py
-x train.py
-- train.py a
--role x -- train.py a
--role x -- train.py -- a
train.py --unknown=1 -x
--nproc-per-node 2 --nproc-per-node 4 train.py
-m -r3 --tee 1 --role=a --log-dir=/l --standalone pkg.train --role b
"""


def torchs_parser(module: str) -> Any:
    if module == "run":
        from torch.distributed.run import parse_args
    else:
        from torch.distributed.launch import parse_args
    return parse_args


def torchs(module: str, line: str) -> Namespace | None:
    """Return torch's result; None if torch refuses the command line."""
    try:
        parsed: Namespace = torchs_parser(module)(shlex.split(line))
    except SystemExit:
        return None
    return parsed


def same(module: str, line: str, env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Assert that torch and elasticjob read the same; return whether the command line is valid."""
    theirs = torchs(module, line)
    capsys.readouterr()
    if theirs is None:
        with pytest.raises(CommandError):
            parse_torchrun(shlex.split(line), env, is_launch=module == "launch")
        return False
    ours = parse_torchrun(shlex.split(line), env, is_launch=module == "launch")
    defaults = vars(torchs_parser(module)(["train.py"])) if not env else {}
    script_args = tuple(theirs.training_script_args)
    if module == "launch" and not theirs.use_env:
        script_args = ("--local-rank=${local_rank}", *script_args)
    assert (ours.program, ours.args) == (theirs.training_script, script_args)
    for name, value in vars(theirs).items():
        option = name.replace("_", "-")
        if option in ours.options:
            assert ours.options[option] == ("" if value is True else str(value)), name
        elif not name.startswith("training_script"):
            assert value == defaults.get(name, value), f"elasticjob does not read --{option}"
    return True


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PET_")]:
        monkeypatch.delenv(name)


def test_command_lines_read_as_by_torchs_parser(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LINES.strip().splitlines()
    valid = sum(same("run", line, {}, capsys) for line in lines)
    assert len(lines) >= 60
    assert valid >= 50


@pytest.mark.parametrize(
    "line",
    [
        "train.py a",
        "--use-env train.py a",
        "--use_env train.py",
        "--use train.py",
        "--use-env --no-python ./run.sh",
        "--nproc_per_node=2 --master_port 1 train.py --lr 1",
        "--use-env=1 train.py",
        "-m pkg.train",
    ],
)
def test_the_launch_module_reads_its_own_option(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    same("launch", line, {}, capsys)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"PET_MODULE": "1"}, "pkg.train"),
        ({"PET_MODULE": "0"}, "train.py"),
        ({"PET_MODULE": "0"}, "-m pkg.train"),
        ({"PET_NO_PYTHON": "1"}, "./run.sh a"),
        ({"PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "1"}, "train.py"),
        ({"PET_NPROC_PER_NODE": "3"}, "--nproc-per-node 2 train.py"),
        ({"PET_MAX_RESTARTS": "3"}, "train.py"),
        ({"PET_MAX_RESTARTS": "x"}, "train.py"),
        ({"PET_TEE": "3", "PET_ROLE": "a"}, "--tee 1 train.py"),
    ],
)
def test_variables_set_absent_options(
    variables: dict[str, str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    same("run", line, variables, capsys)


def test_every_option_of_torchrun_has_its_row() -> None:
    """Each option is known with torch's type, and the table in design/torchrun.md says what becomes of it."""
    from torch.distributed.run import get_args_parser

    page = (Path(__file__).parents[2] / "docs/contribute/design/torchrun.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `--")]
    documented = {name: row[2].strip() for row in rows for name in re.findall(r"`--([a-z-]+)", row[1])}
    assert documented == {option.name: option.use.value for option in TORCHRUN_OPTIONS.values()}
    for action in get_args_parser()._actions:
        if action.option_strings:
            option = TORCHRUN_OPTIONS[action.dest.replace("_", "-")]
            assert (option.parse is None) == (action.nargs == 0), option.name
            if option.use is not OptionUse.REFUSED:
                assert option.parse in (None, action.type), option.name

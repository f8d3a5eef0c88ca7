"""Launchers in a pod's command: which commands may start one, and what their ranks get from it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticjob._runtime.agent.reporting.log_options import BOTH, LogOptions, with_launcher_options
from elasticjob._runtime.agent.start_workers.command import (
    CommandError,
    PlainCommand,
    parse_command,
    parse_shell_launch,
    with_local_rank,
)
from elasticjob._runtime.agent.start_workers.in_workers.launchers import log_options
from elasticjob._runtime.agent.start_workers.launches.launcher_commands import may_start_launcher
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch, receive_streams
from elasticjob._runtime.agent.start_workers.launches.stage_start import rank_command, rank_environment
from elasticjob._runtime.agent.start_workers.shims.shim_callers import ShimCaller


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["bash", "-c", "pip install x && torchrun train.py"], True),
        (["bash", "-c", "/opt/venv/bin/torchrun \\\n  train.py"], True),
        (["bash", "-c", "uv run python -m torch.distributed.run train.py"], True),
        (["accelerate", "launch", "train.py"], True),
        (["/opt/venv/bin/trl", "sft"], True),
        (["bash", "-c", "tune run x"], True),
        (["bash", "-c", "tune download x; ./trainer"], False),
        (["bash", "-c", "python train.py"], False),
        (["bash", "-c", "./trainer --out torchrun.log"], False),
        (["bash", "-c", "deepspeed train.py"], True),
        (["deepspeed", "train.py"], True),
        (["bash", "-c", "cd x && FOO=1 /opt/venv/bin/composer -n 8 train.py"], True),
        (["bash", "-c", "numactl --membind=0 deepspeed train.py"], True),
        (["numactl", "--membind=0", "deepspeed", "train.py"], True),
        (["bash", "-c", "python -m deepspeed.launcher.launch train.py"], True),
        (["bash", "-c", "python train.py --strategy deepspeed --stage 2"], False),
        (["bash", "-c", "numactl --membind=0 python train.py --strategy deepspeed --stage 2"], False),
        (["bash", "-c", "pip install deepspeed; python train.py"], False),
        (["bash", "-c", "ALLOW_SEPARATE_WORLDS=1 torchrun train.py"], False),
        (["python", "train.py", "torchrun"], False),
        (["bash", "{folder}/launches.sh"], True),
        (["{folder}/launches.sh", "x"], True),
        (["{folder}/trains.sh"], False),
        (["{folder}/program.py"], False),
        (["bash", "{folder}/missing.sh"], False),
    ],
)
def test_which_commands_run_once_until_they_start_a_launcher(argv: list[str], expected: bool, tmp_path: Path) -> None:
    (tmp_path / "launches.sh").write_text("#!/usr/bin/env bash\ncd x\ntorchrun train.py\n")
    (tmp_path / "trains.sh").write_text("#!/bin/sh\npython train.py\n")
    (tmp_path / "program.py").write_text("#!/usr/bin/python3\n# as torchrun does\n")
    command = parse_command([word.format(folder=tmp_path) for word in argv])
    assert may_start_launcher(command, {}) is expected
    assert not may_start_launcher(command, {"ALLOW_SEPARATE_WORLDS": "1"})


def test_a_torchrun_keeps_its_macros_for_its_ranks() -> None:
    env = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    command = parse_shell_launch(["torchrun", "t.py", "${local_rank}", "$x"], "python3", env)
    assert command is not None
    assert with_local_rank(command, "1").argv[-2:] == ("1", "$x")
    assert parse_shell_launch(["python", "t.py"], "python3", env) is None
    with pytest.raises(CommandError, match=r"set spec\.nprocPerNode: 3"):
        parse_shell_launch(["torchrun", "--nproc-per-node=3", "t.py"], "python3", env)


def test_a_rank_has_the_launchers_environment_and_its_own_rank() -> None:
    given = {"RANK": "0", "ACCELERATE_X": "1", "ELASTICJOB_LAUNCHES": "/s", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    launch = Launch(ShimCaller((), given, "/", 0, (), (), ()), PlainCommand(("x",), ""), role="r")
    worker = {"RANK": "3", "ROLE_NAME": "default", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert rank_environment(launch, worker) == {
        "RANK": "3",
        "ACCELERATE_X": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ROLE_NAME": "r",
        "ELASTICJOB_LAUNCHED": "1",
    }


def test_each_rank_has_the_launchers_variables_and_arguments() -> None:
    caller = ShimCaller((), {"HOME": "/h"}, "/", 0, (), (), ())
    command = PlainCommand(("x", "--local_rank=${local_rank}", "$RANK", "${RANK}", "$$", "$y"), "", has_macros=True)
    launch = Launch(caller, command, variables={"NODE_RANK": "GROUP_RANK"})
    env = rank_environment(launch, {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2"})
    assert env["NODE_RANK"] == "2"
    assert rank_command(launch, env).argv == ("x", "--local_rank=1", "$RANK", "${RANK}", "$", "$y")
    assert rank_command(replace(launch, expands=True), env).argv == (
        "x",
        "--local_rank=${local_rank}",
        "5",
        "5",
        "$$",
        "$y",
    )


def test_the_options_of_a_launcher_come_before_those_of_the_template() -> None:
    base = LogOptions("/template", tee={None: BOTH}, prefix="p")
    assert with_launcher_options(base, {}) == base
    given = {"redirects": "1:3", "tee": "0:2", "local-ranks-filter": "0,1", "log-dir": "/launcher"}
    options = with_launcher_options(base, given)
    assert options == LogOptions("/launcher", {1: 3}, {0: 2}, frozenset({0, 1}), "p")
    assert options.has_tee(0, 2)
    assert not options.has_tee(0, 1)
    with pytest.raises(ValueError, match="want 0"):
        with_launcher_options(base, {"tee": "9"})
    with pytest.raises(ValueError, match="set --log-dir"):
        with_launcher_options(LogOptions(), {"tee": "3"})


def test_the_options_that_a_launcher_hands_over() -> None:
    """The attributes are those of torch's DefaultLogsSpecs; `Std` is an IntFlag there."""
    specs = SimpleNamespace(_root_log_dir="/logs", _redirects={1: 3, 0: 1}, _tee=2, _local_ranks_filter={3, 0})
    config = SimpleNamespace(logs_specs=specs, log_line_prefix_template="x")
    expected = {"log-dir": "/logs", "redirects": "0:1,1:3", "tee": "2", "local-ranks-filter": "0,3"}
    assert log_options(config) == {**expected, "log-line-prefix-template": "x"}
    own = SimpleNamespace(_root_log_dir="/tmp/torchelastic_x", _redirects=0, _tee=0, _local_ranks_filter=None)
    assert log_options(SimpleNamespace(logs_specs=own)) == {}


def test_a_launcher_that_has_closed_a_stream_hands_none_over() -> None:
    first, second = os.pipe()
    try:
        assert receive_streams([first, second], [0, 2]) is None
    finally:
        os.close(first)
        os.close(second)

"""The environment of workers, and of a stock torchrun."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.agent.start_workers.worker_environment import node_env, torchrun_env, worker_env
from elasticjob._runtime.contract.commands.reserved_variables import RESERVED_PREFIX, RESERVED_VARIABLES
from elasticjob._runtime.contract.commands.torchrun_command import TORCHRUN_OPTIONS, OptionUse
from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import PRESTART_ROUND, Backend, RoundId
from elasticjob._runtime.system.code_root import IN_WORKERS

START = StartRound(RoundId(1, 0, 3), 1, 3, 2, 6, 2, 6, "10.0.0.1", 4567, 2, 5)


def test_a_workers_environment_is_torchruns() -> None:
    env = worker_env(
        START, local_rank=1, local_world_size=2, role="default", run_id="uid", error_file="/e",
        agent_socket="/s", base={},
    )  # fmt: skip
    assert env == {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4567",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "uid",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "ELASTICJOB_AGENT_SOCKET": "/s",
        "ELASTICJOB_ROUND": "1.0.3",
        "PET_NPROC_PER_NODE": "2",
        "ELASTICJOB_WORLD": "LOCAL_RANK=1 RANK=3 GROUP_RANK=1 ROLE_RANK=3 LOCAL_WORLD_SIZE=2 WORLD_SIZE=6"
        " GROUP_WORLD_SIZE=3 ROLE_WORLD_SIZE=6 MASTER_ADDR=10.0.0.1 MASTER_PORT=4567",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }


def test_a_worker_that_starts_ahead_of_a_round_gets_no_store() -> None:
    """A process group outside of the function then fails at once, and does not wait for ranks that never come."""
    start = replace(START, round=PRESTART_ROUND, master_addr="", master_port=0)
    env = worker_env(
        start, local_rank=1, local_world_size=2, role="default", run_id="uid", error_file="/e",
        agent_socket="/s", base={},
    )  # fmt: skip
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["ELASTICJOB_ROUND"]) == ("3", "6", "0.0.0")


@pytest.mark.parametrize(
    ("base", "workers", "threads"), [({}, 1, None), ({}, 2, "1"), ({"OMP_NUM_THREADS": "4"}, 2, "4")]
)
def test_several_workers_get_one_thread_each_by_default(
    base: dict[str, str], workers: int, threads: str | None
) -> None:
    assert node_env(base, workers, "/code").get("OMP_NUM_THREADS") == threads


def test_the_users_options_of_the_resolver_win() -> None:
    assert node_env({}, 1, "/code")["RES_OPTIONS"] == "timeout:1 attempts:5"
    assert node_env({"RES_OPTIONS": ""}, 1, "/code")["RES_OPTIONS"] == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, ":/code"), ({"PYTHONPATH": "/users"}, ":/users:/code")],
)
def test_patches_of_torch_come_first_on_pythonpath_and_this_package_last(before: dict[str, str], after: str) -> None:
    assert node_env(before, 1, "/code")["PYTHONPATH"] == f"/code/{IN_WORKERS}{after}"
    assert node_env(before, 1, "/code", Backend.C10D)["PYTHONPATH"] == after[1:]


def torchrun_variables(base: dict[str, str]) -> dict[str, str]:
    return torchrun_env(
        START, local_world_size=2, role="default", address="10.0.0.7", endpoint="job-rdzv:29400", run_id="uid",
        join_timeout=600.0, error_file="/e", base=base,
    )  # fmt: skip


def test_a_torchrun_gets_its_rendezvous_and_no_ranks() -> None:
    assert torchrun_variables({}) == {
        "PET_NNODES": "3:3",
        "PET_NPROC_PER_NODE": "2",
        "PET_ROLE": "default",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-rdzv:29400",
        "PET_RDZV_ID": "uid.1.0.3",
        "PET_RDZV_CONF": "is_host=0,join_timeout=600",
        "PET_MAX_RESTARTS": "0",
        "PET_LOCAL_ADDR": "10.0.0.7",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "PET_MONITOR_INTERVAL": "0.1",
    }


def test_the_users_monitor_interval_wins() -> None:
    assert "PET_MONITOR_INTERVAL" not in torchrun_variables({"PET_MONITOR_INTERVAL": "2"})


class EveryVariable(dict[str, str]):
    """An environment that has a value of the template for each variable."""

    def __contains__(self, name: object) -> bool:
        return True


def test_reserved_are_the_variables_whose_value_in_a_template_is_lost() -> None:
    """Neither defaults nor variables of torchrun's options that elasticjob honours are reserved."""
    worker = worker_env(
        START, local_rank=1, local_world_size=2, role="default", run_id="uid", error_file="/e",
        agent_socket="/s", base=EveryVariable(),
    )  # fmt: skip
    honoured = {option.variable for option in TORCHRUN_OPTIONS.values() if option.use is OptionUse.HONOURED}
    # A template may have the one value that elasticjob sets, as design/torchrun.md recommends for torch's handler.
    honoured.add("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    replaced = {*worker, *torchrun_variables(EveryVariable())} - honoured
    assert {name for name in replaced if not name.startswith(RESERVED_PREFIX)} == RESERVED_VARIABLES


def test_a_worker_learns_which_defaults_the_user_has_chosen_and_where_stacks_go() -> None:
    """torch's guard against hanging collectives is taken away only where the agent's default stands for it."""

    def variables(start: StartRound, base: dict[str, str]) -> dict[str, str]:
        return worker_env(
            start, local_rank=0, local_world_size=1, role="default", run_id="uid", error_file="/e",
            agent_socket="/s", stack_dump_file="/stacks", base=base,
        )  # fmt: skip

    ours, users = variables(START, {}), variables(START, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert ours["ELASTICJOB_STACK_DUMP_FILE"] == users["ELASTICJOB_STACK_DUMP_FILE"] == "/stacks"
    assert "ELASTICJOB_SET_BY_USER" not in ours
    assert users["ELASTICJOB_SET_BY_USER"] == "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in users
    assert "ELASTICJOB_DETECT_HANGS" not in ours
    assert variables(replace(START, progress_timeout=10.0), {})["ELASTICJOB_DETECT_HANGS"] == "1"

"""The agent's configuration, read from environment variables and torchrun's options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob._runtime.agent.config import UsageError, read_config, read_options
from elasticjob._runtime.agent.main import signals
from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.contract.names import Env

ENV = {
    Env.RUN_ID: "uid",
    Env.NODE_KEY: "00ff",
    Env.INDEX: "2",
    Env.POD_NAME: "job-2-1",
    Env.POD_IP: "10.0.0.7",
    Env.STORE_ENDPOINT: "job-rdzv:29400",
    "PATH": "/bin",
}


def test_configuration_has_the_documented_defaults_and_keeps_the_key_from_the_workers() -> None:
    config = read_config(ENV)
    assert (config.host, config.port, config.index, config.key) == ("job-rdzv", 29400, 2, b"\x00\xff")
    assert (config.preload, config.local_world_size) == (("torch", "torch._dynamo"), 1)
    assert (config.keep_alive_interval, config.keep_alive_attempts, config.stop_grace) == (1.0, 3, 1.0)
    assert (config.graceful_shutdown, config.pod_grace) == (120.0, None)
    assert read_config({**ENV, Env.POD_GRACE_SECONDS: "25"}).pod_grace == 25.0
    assert Env.NODE_KEY not in config.env
    assert (config.env["PATH"], config.env["PYTHONUNBUFFERED"]) == ("/bin", "1")
    assert read_config({**ENV, "PYTHONUNBUFFERED": ""}).env["PYTHONUNBUFFERED"] == "", "the image has set it"
    assert read_config({**ENV, Env.PRELOAD: ""}).preload == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Env.INDEX: None}, "ELASTICJOB_INDEX is not set"),
        ({Env.INDEX: "-1"}, "ELASTICJOB_INDEX=-1: want a whole number, 0 or more"),
        ({Env.NODE_KEY: "secret"}, "ELASTICJOB_NODE_KEY=...: want hex digits"),
        ({Env.KEEP_ALIVE: "1"}, "ELASTICJOB_KEEP_ALIVE=1: want INTERVALxATTEMPTS"),
        ({Env.STOP_GRACE_SECONDS: "nan"}, "want seconds, 0 or more"),
        ({Env.GRACEFUL_SHUTDOWN_SECONDS: "-1"}, "ELASTICJOB_GRACEFUL_SHUTDOWN_SECONDS=-1: want seconds, 0 or more"),
        ({Env.POD_GRACE_SECONDS: "soon"}, "ELASTICJOB_POD_GRACE_SECONDS=soon"),
        ({Env.RENDEZVOUS_BACKEND: "etcd"}, "ELASTICJOB_RENDEZVOUS_BACKEND=etcd"),
        ({Env.STORE_ENDPOINT: "host:port"}, "ELASTICJOB_STORE_ENDPOINT=host:port: want a whole number"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str | None], message: str) -> None:
    env = {name: value for name, value in {**ENV, **change}.items() if value is not None}
    with pytest.raises(UsageError) as caught:
        read_config(env)
    assert message in str(caught.value)


def test_with_c10d_one_process_runs_all_workers_of_a_node() -> None:
    config = read_config({**ENV, Env.NPROC_PER_NODE: "4"})
    assert (config.processes, config.local_world_size, config.torchrun_workers) == (4, 4, 0)
    c10d = {**ENV, Env.NPROC_PER_NODE: "4", Env.RENDEZVOUS_BACKEND: "c10d", "PET_TEE": "3", "PET_ROLE": "trainer"}
    config = read_config(c10d, {"redirects": "3"})
    assert config.role == "trainer"
    assert config.logs == replace(read_config(ENV).logs, prefix="[job-2-1]:")
    assert (config.processes, config.torchrun_workers, config.endpoint) == (1, 4, "job-rdzv:29400")


def test_logs_are_configured_as_torchruns() -> None:
    assert read_config(ENV).logs.prefix == "[${role_name}${rank}]:"
    env = {**ENV, "PET_REDIRECTS": "0:1,1:2", "PET_TEE": "3", "PET_ROLE": "trainer"}
    config = read_config(env, {"tee": "1:3", "local-ranks-filter": "1", "log-dir": "/l"})
    assert (config.role, config.logs.directory, config.logs.tee) == ("trainer", "/l", {1: 3})
    for change in ({"PET_TEE": "4"}, {"PET_REDIRECTS": "0:x"}, {"PET_LOCAL_RANKS_FILTER": "a"}):
        with pytest.raises(UsageError, match=next(iter(change))):
            read_config({**ENV, **change})


def test_signals_on_which_an_agent_leaves() -> None:
    assert [s.name for s in signals({})] == ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"]
    assert [s.name for s in signals({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR2,SIGKILL,none"})] == ["SIGUSR2"]
    blanks = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT, SIGTERM "}
    assert [s.name for s in signals(blanks)] == ["SIGINT", "SIGTERM"]


@pytest.mark.parametrize(
    ("written", "is_default", "line", "expected"),
    [
        (None, None, "torchrun --nproc-per-node=3 t.py", 3),
        ("1", "1", "torchrun --nproc-per-node=3 t.py", 3),
        ("2", "1", "torchrun --nproc-per-node=auto t.py", 2),
        ("2", "1", "torchrun --nproc-per-node=gpu t.py", 2),
        ("2", "1", "torchrun t.py", 2),
        ("2", "1", "python t.py --nproc-per-node=3", 2),
        ("3", "0", "torchrun --nproc-per-node=3 t.py", 3),
        ("3", "0", "torchrun --nproc-per-node=gpu t.py", 3),
        ("2", "0", "torchrun --nproc-per-node=3 t.py", "nprocPerNode is 2 and the command has --nproc-per-node=3"),
        ("1", "1", "torchrun --nproc-per-node=gpu t.py", "--nproc-per-node is gpu, and the trainer container requests"),
        ("1", "1", "torchrun --nproc-per-node=cpu t.py", "set spec.nprocPerNode: cpu"),
        ("1", "1", "torchrun --nproc-per-node=99 t.py", "--nproc-per-node '99': want a number from 1 to 64"),
        ("1", "1", "torchrun --nproc-per-node=xpu t.py", "--nproc-per-node 'xpu': want a number"),
    ],
)
@pytest.mark.parametrize("variable", [False, True])
def test_the_number_of_workers_in_the_command_or_in_torchruns_variable_counts(
    written: str | None, is_default: str | None, line: str, expected: int | str, variable: bool
) -> None:
    """The agent reads what the operator could not: a variable of the image, or `$(NAME)` in the command."""
    changes = {Env.NPROC_PER_NODE: written, Env.NPROC_IS_DEFAULT: is_default}
    env = ENV | {name: value for name, value in changes.items() if value is not None}
    command = line.split()
    if variable and command[0] == "torchrun" and len(command) == 3:
        env["PET_NPROC_PER_NODE"] = command.pop(1).partition("=")[2]
    if isinstance(expected, int):
        assert read_config(env, read_options(env, command)).local_world_size == expected
        return
    with pytest.raises((UsageError, CommandError)) as caught:
        read_config(env, read_options(env, command))
    assert expected in str(caught.value)


def test_with_c10d_the_number_in_torchruns_own_command_counts() -> None:
    env = {**ENV, Env.RENDEZVOUS_BACKEND: "c10d", Env.NPROC_PER_NODE: "1", Env.NPROC_IS_DEFAULT: "1"}
    command = ["torchrun", "--numa-binding=node", "--nproc-per-node=3", "t.py"]
    assert read_config(env, read_options(env, command)).local_world_size == 3
    for ignored in (["torchrun", "--nproc-per-node=gpu", "t.py"], ["torchrun", "--bad"], ["bash", "run.sh"]):
        assert read_options(env, ignored) == {}


def test_options_without_effect_are_named_and_refused_ones_are_errors() -> None:
    line = "torchrun --nnodes 4 --max-restarts=2 --role x t.py --nnodes 1"
    assert read_config(ENV, read_options(ENV, line.split())).options_note == (
        "torchrun options without effect: --nnodes (spec.replicas and spec.elasticPolicy set the number of pods), "
        "--max-restarts (spec.failurePolicy.maxRestarts is the job's budget)"
    )
    assert read_config(ENV, read_options(ENV, ["torchrun", "--role", "x", "t.py"])).options_note == ""
    with pytest.raises(CommandError, match="--numa-binding is not supported"):
        read_config(ENV, read_options(ENV, ["torchrun", "--numa-binding", "node", "t.py"]))
    env = {**ENV, "PET_VIRTUAL_LOCAL_RANK": "1"}
    with pytest.raises(CommandError, match="--virtual-local-rank is not supported"):
        read_config(env, read_options(env, ["torchrun", "t.py"]))


def test_the_log_prefix_may_come_from_torchs_other_variable() -> None:
    env = {**ENV, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}
    assert read_config(env).logs.prefix == "<${rank}> "
    assert read_config({**env, "PET_LOG_LINE_PREFIX_TEMPLATE": "a"}).logs.prefix == "a"
    assert read_config(env, {"log-line-prefix-template": "b"}).logs.prefix == "b"

"""The agent's configuration, read from environment variables and torchrun's options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob.agent.config import UsageError, read_config
from elasticjob.agent.main import signals
from elasticjob.contract.names import Env

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
    assert Env.NODE_KEY not in config.env
    assert config.env["PATH"] == "/bin"
    assert read_config({**ENV, Env.PRELOAD: ""}).preload == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Env.INDEX: None}, "ELASTICJOB_INDEX is not set"),
        ({Env.INDEX: "-1"}, "ELASTICJOB_INDEX=-1: want a whole number, 0 or more"),
        ({Env.NODE_KEY: "secret"}, "ELASTICJOB_NODE_KEY=...: want hex digits"),
        ({Env.KEEP_ALIVE: "1"}, "ELASTICJOB_KEEP_ALIVE=1: want INTERVALxATTEMPTS"),
        ({Env.STOP_GRACE_SECONDS: "nan"}, "want seconds, 0 or more"),
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
    c10d = {**ENV, Env.NPROC_PER_NODE: "4", Env.RENDEZVOUS_BACKEND: "c10d", "PET_TEE": "3"}
    config = read_config(c10d, {"redirects": "3"})
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

"""Configuration, environment, termination message, evidence and output of the agent."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob.agent.config import UsageError, read_config
from elasticjob.agent.main import signals
from elasticjob.agent.monitoring.worker_exits import WorkerExit, failure_of, read_error_file, read_torchrun_report
from elasticjob.agent.reporting.log_options import STDERR, STDOUT, LogOptions, read_ranks, read_streams
from elasticjob.agent.reporting.termination_message import MAX_BYTES, termination_json
from elasticjob.agent.reporting.worker_output import MAX_LINE, MAX_PENDING, OutputSink, Tail, WorkerPipe
from elasticjob.agent.worker_environment import node_env, torchrun_env, worker_env
from elasticjob.contract import codec
from elasticjob.contract.messages import Failure, FailureClass, Outcome, StartRound, Termination
from elasticjob.contract.names import Env, RoundId

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
    ("change", "sentence"),
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
def test_a_wrong_variable_is_named(change: dict[str, str | None], sentence: str) -> None:
    env = {name: value for name, value in {**ENV, **change}.items() if value is not None}
    with pytest.raises(UsageError) as caught:
        read_config(env)
    assert sentence in str(caught.value)


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
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("base", "workers", "threads"), [({}, 1, None), ({}, 2, "1"), ({"OMP_NUM_THREADS": "4"}, 2, "4")]
)
def test_several_workers_get_one_thread_each_unless_told(
    base: dict[str, str], workers: int, threads: str | None
) -> None:
    assert node_env(base, workers, "/code").get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(("before", "after"), [({}, "/code"), ({"PYTHONPATH": "/theirs"}, "/theirs:/code")])
def test_scripts_can_import_us_after_what_is_theirs(before: dict[str, str], after: str) -> None:
    assert node_env(before, 1, "/code")["PYTHONPATH"] == after


def torchruns(base: dict[str, str]) -> dict[str, str]:
    return torchrun_env(
        START, local_world_size=2, role="default", address="10.0.0.7", endpoint="job-rdzv:29400", run_id="uid",
        join_timeout=600.0, error_file="/e", base=base,
    )  # fmt: skip


def test_a_torchrun_is_told_its_round_and_nothing_of_ranks() -> None:
    assert torchruns({}) == {
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


def test_with_c10d_one_process_stands_for_all_workers_of_a_node() -> None:
    config = read_config({**ENV, Env.NPROC_PER_NODE: "4"})
    assert (config.processes, config.local_world_size, config.torchruns_workers) == (4, 4, 0)
    c10d = {**ENV, Env.NPROC_PER_NODE: "4", Env.RENDEZVOUS_BACKEND: "c10d", "PET_TEE": "3"}
    config = read_config(c10d, {"redirects": "3"})
    assert config.logs == replace(read_config(ENV).logs, prefix="[job-2-1]:")
    assert (config.processes, config.torchruns_workers, config.endpoint) == (1, 4, "job-rdzv:29400")


def test_a_torchruns_monitor_interval_is_the_users() -> None:
    assert "PET_MONITOR_INTERVAL" not in torchruns({"PET_MONITOR_INTERVAL": "2"})


text = st.text(max_size=6000)


@given(st.sampled_from(Outcome), text, text, text, text)
def test_a_termination_message_fits_and_keeps_outcome_round_and_rank(
    outcome: Outcome, reason: str, message: str, exception: str, said: str
) -> None:
    failure = Failure(FailureClass.USER_ERROR, "pod", 1.0, rank=7, exit_code=1, exception=exception, message=said)
    data = termination_json(Termination(outcome, reason, RoundId(1, 2, 3), message, failure))
    assert len(data) <= MAX_BYTES
    assert data.startswith(b'{"outcome":"%s"' % outcome.value.encode())
    back = codec.parse(Termination, json.loads(data))
    assert back.round == RoundId(1, 2, 3)
    assert back.failure is not None
    assert back.failure.rank == 7


def test_logs_are_configured_as_torchruns() -> None:
    assert read_config(ENV).logs.prefix == "[${role_name}${rank}]:"
    env = {**ENV, "PET_REDIRECTS": "0:1,1:2", "PET_TEE": "3", "PET_ROLE": "trainer"}
    config = read_config(env, {"tee": "1:3", "local-ranks-filter": "1", "log-dir": "/l"})
    assert (config.role, config.logs.directory, config.logs.tee) == ("trainer", "/l", {1: 3})
    for change in ({"PET_TEE": "4"}, {"PET_REDIRECTS": "0:x"}, {"PET_LOCAL_RANKS_FILTER": "a"}):
        with pytest.raises(UsageError, match=next(iter(change))):
            read_config({**ENV, **change})


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks", "shown", "kept"),
    [
        ("0", "0", "", {(0, 1), (0, 2), (1, 1), (1, 2)}, set()),
        ("3", "0", "", set(), {(0, 1), (0, 2), (1, 1), (1, 2)}),
        ("1", "0", "", {(0, 2), (1, 2)}, {(0, 1), (1, 1)}),
        ("0", "3", "1", {(1, 1), (1, 2)}, {(0, 1), (0, 2), (1, 1), (1, 2)}),
        ("0:3", "1:2", "", {(1, 1), (1, 2)}, {(0, 1), (0, 2), (1, 2)}),
        ("3", "0:1", "", {(0, 1)}, {(0, 1), (0, 2), (1, 1), (1, 2)}),
    ],
)
def test_redirects_tee_and_the_filter_of_ranks(
    redirects: str, tee: str, ranks: str, shown: set[tuple[int, int]], kept: set[tuple[int, int]]
) -> None:
    logs = LogOptions("/l", read_streams(redirects), read_streams(tee), read_ranks(ranks), "${hostname}:${rank}: $x")
    every = [(rank, stream) for rank in (0, 1) for stream in (STDOUT, STDERR)]
    assert {worker for worker in every if logs.shown(*worker)} == shown
    assert {worker for worker in every if logs.kept(*worker)} == kept
    assert logs.line_prefix(role="r", local_rank=0, rank=3, hostname="n") == "n:3: $x"


def test_signals_on_which_an_agent_leaves() -> None:
    assert [s.name for s in signals({})] == ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"]
    assert [s.name for s in signals({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR2,SIGKILL,none"})] == ["SIGUSR2"]


TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*TRACEBACK, "ValueError: bad batch"], ("ValueError", "bad batch")),
        ([*TRACEBACK, "pkg.errors.Bad: no"], ("Bad", "no")),
        ([*TRACEBACK, "KeyboardInterrupt"], ("KeyboardInterrupt", "")),
        ([*TRACEBACK, "KeyError: 1", "", "During ...:", "", *TRACEBACK, "OSError: x", "later"], ("OSError", "x")),
        (["ValueError: printed without a traceback"], None),
        ([f"[rank3]: {line}" for line in (*TRACEBACK, "ValueError: bad")], ("ValueError", "bad")),
        ([*TRACEBACK, "OSError: x", *TRACEBACK, "torch.errors.ChildFailedError: ", "===="], ("OSError", "x")),
    ],
)
def test_the_last_exception_of_standard_error(lines: list[str], expected: tuple[str, str] | None) -> None:
    tail = Tail()
    for line in lines:
        tail.feed(line.encode())
    assert tail.exception == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"message": {"message": "ValueError: bad", "extraInfo": {}}}', ("ValueError", "bad")),
        ('{"message": "something else: x"}', ("", "something else: x")),
        ("{", None),
        ("[1]", None),
        ('{"message": {"message": 3}}', None),
    ],
)
def test_torchs_error_file(tmp_path: Path, content: str, expected: tuple[str, str] | None) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    found = read_error_file(str(path))
    assert (found[:2] if found else None) == expected


REPORT = """Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 8)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:09:32
  rank      : 7 (local_rank: 0)
  exitcode  : -9 (pid: 9)  (SIGKILL)
  error_file: <N/A>
=====""".splitlines()


@pytest.mark.parametrize(("lines", "expected"), [(REPORT, (7, -9)), (REPORT[:4], None), (REPORT[:7], None), ([], None)])
def test_the_root_cause_in_torchruns_report(lines: list[str], expected: tuple[int, int] | None) -> None:
    assert read_torchrun_report(lines) == expected


def test_a_failure_from_what_is_left_of_a_worker() -> None:
    killed = failure_of(WorkerExit(3, -9, 1.0, lines=["a", "b"]), "pod")
    assert (killed.signal, killed.exit_code, killed.message, killed.kind) == (
        "SIGKILL",
        None,
        "a\nb",
        FailureClass.KILLED,
    )
    assert failure_of(WorkerExit(3, -9, 1.0, oom_killed=True), "pod").kind is FailureClass.OOM_KILLED
    raised = failure_of(WorkerExit(3, 1, 1.0, exception=("ValueError", "x" * 5000)), "pod")
    assert (raised.exception, len(raised.message), raised.exit_code) == ("ValueError", 1024, 1)


async def test_output_is_prefixed_line_by_line_and_long_lines_are_cut() -> None:
    (out, into), (read, write) = os.pipe(), os.pipe()
    tail = Tail()
    sink = OutputSink(write)
    stream = WorkerPipe(out, "[default3]:", sink, tail)
    reader = asyncio.get_running_loop().run_in_executor(None, _read_all, read)
    await asyncio.to_thread(_write_all, into, b"one\ntwo\n" + b"x" * (MAX_LINE + 10) + b"\nlast")
    stream.close()
    sink.close(10)
    os.close(write)
    lines = (await reader).split(b"\n")
    assert lines[:2] == [b"[default3]:one", b"[default3]:two"]
    assert lines[-2:] == [b"[default3]:last", b""]
    assert all(line.startswith(b"[default3]:") for line in lines[:-1])
    assert sum(len(line) - len(b"[default3]:") for line in lines[2:-2]) == MAX_LINE + 10
    assert tail.lines[-1] == "last"


async def test_a_slow_reader_stops_the_worker_and_not_the_loop() -> None:
    (out, into), (read, write) = os.pipe(), os.pipe()
    os.set_blocking(into, False)
    sink = OutputSink(write)
    stream = WorkerPipe(out, "", sink)
    sent, stuck = 0, 0
    while stuck < 100:  # nobody reads: the pipes and the pending bytes fill
        try:
            sent += os.write(into, b"line\n" * 1000)
            stuck = 0
        except BlockingIOError:
            stuck += 1
        await asyncio.sleep(0)
    assert sent < 2 * MAX_PENDING
    reader = asyncio.get_running_loop().run_in_executor(None, _read_all, read)
    os.set_blocking(into, True)
    await asyncio.to_thread(_write_all, into, b"end\n")
    stream.close()
    await asyncio.to_thread(sink.close, 10)
    os.close(write)
    assert len(await reader) == sent + 4


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()

"""The agent starts the workers of a round only with the code that the round names."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.agent import shipped_code
from elasticjob._runtime.agent.config import AgentConfig, read_config
from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.agent.shipped_code import CodeError, ShippedCode
from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.launcher import Launcher
from elasticjob._runtime.agent.workers.processes.worker_process import FOR_NEXT_ROUND, IN_ROUND
from elasticjob._runtime.agent.workers.worker_group import WorkerGroup
from elasticjob._runtime.contract.messages import FailureClass, StartRound
from elasticjob._runtime.contract.names import PRESTART_ROUND, Env, RoundId
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob.cli.shipping.archive import CodeArchive, pack_files

ONE = pack_files([("train.py", b"one", False), ("old.py", b"x", False)], "")
TWO = pack_files([("train.py", b"two", False)], "")
START = StartRound(RoundId(1, 0, 1), 0, 1, 0, 1, 0, 1, "127.0.0.1", 4567, 0, 3)


@pytest.fixture
def code(tmp_path: Path) -> ShippedCode:
    """Code that is unpacked: ONE."""
    (tmp_path / "files").mkdir()
    code = ShippedCode(tmp_path / "code.tar.gz", tmp_path / "files")
    mount(tmp_path, ONE)
    code.unpack()
    return code


def mount(folder: Path, archive: CodeArchive) -> None:
    (folder / "new").write_bytes(archive.data)
    (folder / "new").rename(folder / "code.tar.gz")


def never() -> bool:
    return False


async def test_an_update_waits_for_the_mount_and_removes_what_is_old(code: ShippedCode, tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "__pycache__").mkdir()
    for compiled in ("train.cpython-313.pyc", "old.cpython-313.pyc", "trainer.cpython-313.pyc"):
        (files / "__pycache__" / compiled).write_text("")
    (files / "checkpoint").write_text("of the script")
    assert code.differs(TWO.digest)
    update = asyncio.create_task(code.update(TWO.digest, never))
    await asyncio.sleep(0)
    assert (files / "train.py").read_text() == "one"
    mount(tmp_path, TWO)
    assert await asyncio.wait_for(update, 60)
    assert sorted(path.name for path in files.rglob("*")) == [
        "__pycache__", "checkpoint", "train.py", "trainer.cpython-313.pyc",
    ]  # fmt: skip
    assert (files / "train.py").read_text() == "two"
    assert not code.differs(TWO.digest)
    assert code.differs(ONE.digest)


async def test_an_update_that_does_not_come_says_what_to_do(code: ShippedCode, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await code.update(TWO.digest, lambda: True)
    monkeypatch.setattr(shipped_code, "MOUNT_SECONDS", 0.0)
    text = f"the round has the code {TWO.digest[:12]}, and .* is still {ONE.digest[:12]} .* --update again"
    with pytest.raises(CodeError, match=text):
        await code.update(TWO.digest, never)


WAITS = """
import os, socket, time
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.contract.restart_messages import Parked, to_packet
round_id = RoundId.parse(os.environ[Env.ROUND])
if round_id.is_prestarted:
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(os.environ[Env.RESTART_SOCKET])
    agent.send(to_packet(Parked(round_id)))
    print(agent.recv(1 << 16))
else:
    time.sleep(600)
"""


def group_of(code: ShippedCode, folder: Path, command: list[str]) -> WorkerGroup:
    config: AgentConfig = read_config(
        {
            **os.environ, Env.RUN_ID: "uid", Env.NODE_KEY: "00ff", Env.INDEX: "0", Env.POD_NAME: "job-0-0",
            Env.POD_IP: "127.0.0.1", Env.STORE_ENDPOINT: "127.0.0.1:1", Env.PRELOAD: "", "PYTHONPATH": CODE_ROOT,
        }
    )  # fmt: skip
    launcher = Launcher(parse_command(command), config.env, (), 2)
    null = os.open(os.devnull, os.O_WRONLY)
    scratch = folder / "scratch"
    scratch.mkdir()
    group = WorkerGroup(replace(config, code=code), launcher, scratch, OutputSink(null), OutputSink(null))
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, group.reap)
    group.expect_start()
    return group


@pytest.mark.parametrize("digest", [TWO.digest, ""])
async def test_a_process_that_waits_at_its_function_ends_if_its_code_is_old(
    code: ShippedCode, tmp_path: Path, digest: str
) -> None:
    group = group_of(code, tmp_path, [sys.executable, "-c", WAITS])
    mount(tmp_path, TWO)
    try:
        assert await group.prestart(replace(START, round=PRESTART_ROUND)) is None
        waiting = set(group.table.pids(FOR_NEXT_ROUND))
        assert len(waiting) == 1
        group.expect_start()
        assert await asyncio.wait_for(group.start(replace(START, code=digest)), 60) is None
        (worker,) = group.table.pids(IN_ROUND)
        assert (worker in waiting) == (not digest)
    finally:
        await group.stop(0.0)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


@pytest.fixture
async def workers(code: ShippedCode, tmp_path: Path) -> AsyncIterator[WorkerGroup]:
    group = group_of(code, tmp_path, ["sh", "-c", f"cat {tmp_path}/files/train.py; exec sleep 600"])
    yield group
    await group.stop(0.0)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


async def test_workers_start_once_the_code_of_their_round_is_there(workers: WorkerGroup, tmp_path: Path) -> None:
    start = asyncio.create_task(workers.start(replace(START, code=TWO.digest)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not workers.table.pids(IN_ROUND)
    mount(tmp_path, TWO)
    assert await asyncio.wait_for(start, 60) is None
    assert (tmp_path / "files/train.py").read_text() == "two"
    assert len(workers.table.pids(IN_ROUND)) == 1


async def test_code_that_does_not_come_is_a_start_error(workers: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_code, "MOUNT_SECONDS", 0.0)
    failure = await workers.start(replace(START, code=TWO.digest))
    assert failure is not None
    assert failure.kind is FailureClass.START_ERROR
    assert "is still" in failure.message
    assert not workers.table.pids(IN_ROUND)


async def test_a_round_that_ends_does_not_wait_for_its_code(workers: WorkerGroup) -> None:
    start = asyncio.create_task(workers.start(replace(START, code=TWO.digest)))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(workers.stop(0.0), 60) is None
    assert await asyncio.wait_for(start, 60) is None
    assert not workers.table.pids(IN_ROUND)


async def test_a_round_without_a_digest_takes_what_is_there(workers: WorkerGroup, code: ShippedCode) -> None:
    assert await workers.start(START) is None
    assert code.digest == ONE.digest

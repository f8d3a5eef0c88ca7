"""The end of a store process: its operator learns what it does not know yet, and a hosted store never stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import (
    Announce,
    Finish,
    Message,
    Outcome,
    Report,
    RoundPhase,
    RoundSettings,
    StartRound,
    WorkersStarted,
    WorkersSucceeded,
)
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect

KEYS = {LinkRole.AGENT: b"n" * 32, LinkRole.OPERATOR: b"o" * 32}
ONE_REPORT_AN_HOUR = """
import sys
from elasticjob._runtime.store_pod import coordinator, main
coordinator.REPORT_SECONDS_PER_AGENT = 3600.0
sys.exit(main.main([]))
"""
"""The store process, with a report that waits for as long as the test likes."""
M = TypeVar("M", bound=Message)


async def receive(link: ControlLink, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
    """Return the next message of class `kind` for which `condition` holds."""
    while True:
        message = await asyncio.wait_for(link.receive(), 30)
        assert message is not None, f"closed while waiting for {kind.__name__}"
        if isinstance(message, kind) and condition(message):
            return message


async def announce(port: int, key: bytes, run_id: str, index: int) -> ControlLink:
    """Connect a node that can start workers at once."""
    link = await connect("127.0.0.1", port, role=LinkRole.AGENT, key=key, run_id=run_id)
    link.send(Announce(index, 0, f"agent-{index}", f"j-{index}-0", "127.0.0.1", 5000 + index, 1, ready=True))
    return link


@pytest.fixture
async def store() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run a store that sends its operator one report an hour; return its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environ = {
            Env.RUN_ID: "r",
            Env.NODE_KEY: KEYS[LinkRole.AGENT].hex(),
            Env.OPERATOR_KEY: KEYS[LinkRole.OPERATOR].hex(),
            Env.SETTINGS: codec.dumps(RoundSettings(1, 1, 1)).decode(),
            Env.LISTEN_FD: str(listener.fileno()),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ONE_REPORT_AN_HOUR, env={**os.environ, **environ}, pass_fds=[listener.fileno()]
        )
    yield process, port
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_the_report_that_waits_reaches_the_operator_before_the_store_ends(
    store: tuple[asyncio.subprocess.Process, int],
) -> None:
    process, port = store
    operator = await connect("127.0.0.1", port, role=LinkRole.OPERATOR, key=KEYS[LinkRole.OPERATOR], run_id="r")
    await receive(operator, Report, lambda report: not report.nodes)
    node = await announce(port, KEYS[LinkRole.AGENT], "r", 0)
    start = await receive(node, StartRound)
    await receive(operator, Report, lambda report: bool(report.nodes))  # the next one may come in an hour
    node.send(WorkersStarted(start.round))
    node.send(WorkersSucceeded(start.round))
    await receive(node, Finish)
    process.send_signal(signal.SIGTERM)  # the job has ended: the store may end at once
    last = await receive(operator, Report)
    assert (last.phase, last.outcome) == (RoundPhase.FINISHED, Outcome.SUCCEEDED)
    assert await asyncio.wait_for(operator.receive(), 30) is None
    assert await asyncio.wait_for(process.wait(), 30) == 0


# ---- a store that torch's rendezvous hosts ---------------------------------------------------------------------


def hosting_handler(monkeypatch: pytest.MonkeyPatch, end_timeout: float) -> Any:
    """Return a rendezvous handler that hosts its store."""
    pytest.importorskip("torch")
    from torch.distributed.elastic.rendezvous import api

    from elasticjob._runtime.torchrun import stores
    from elasticjob._runtime.torchrun.create import create_handler

    monkeypatch.setattr(stores, "END_TIMEOUT", end_timeout)
    conf = {"is_host": True, "read_timeout": 20, "close_timeout": 1, "heartbeat_timeout": 1}
    return create_handler(
        api.RendezvousParameters("elasticjob", "localhost:0", "r", 2, 2, local_addr="127.0.0.1", **conf)
    )


def pipes() -> set[str]:
    """Return the pipes of which this process has an end."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # of the listing itself
            continue
        if target.startswith("pipe:"):
            found.add(target)
    return found


@pytest.mark.torch
async def test_a_hosted_store_does_not_wait_for_nodes_that_end_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pipes()
    handler = hosting_handler(monkeypatch, end_timeout=30.0)
    key, port = handler.endpoint.key, handler.endpoint.port
    nodes = [await announce(port, key, "r", index) for index in range(2)]
    for node in nodes:
        await receive(node, StartRound)  # neither reports that its workers have started: the round stays as it is
    process = handler.hosted.process
    assert handler.shutdown()
    assert process.returncode in (0, -signal.SIGTERM), "it was not killed: the signal found it serving or ending"
    for node in nodes:
        while await asyncio.wait_for(node.receive(), 30) is not None:
            pass
    assert pipes() <= before


@pytest.mark.torch
def test_a_hosted_store_that_does_not_react_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pipes()
    handler = hosting_handler(monkeypatch, end_timeout=0.2)
    process = handler.hosted.process
    assert not handler.is_closed()  # the store serves
    os.kill(process.pid, signal.SIGSTOP)
    assert not handler.shutdown()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert pipes() <= before

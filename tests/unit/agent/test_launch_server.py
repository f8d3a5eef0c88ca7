"""The socket on which launchers connect: a bad request closes its connection, and a mistake of the agent's is seen."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob._runtime.agent.start_workers.launches.launch_server import LaunchServer
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch, RefusedLaunchError

REQUEST = {
    "event": "launch", "argv": ["/bin/true"], "role": "", "log_options": {}, "env": {"A": "1"}, "variables": {},
    "expands": False, "streams": [0, 1, 2],
}  # fmt: skip


class FakeLaunches:
    """What the agent does for launchers: `begin` returns, or raises, `answer`."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.answer = answer
        self.begun: list[Launch] = []

    async def begin(self, launch: Launch) -> asyncio.Future[int] | None:
        self.begun.append(launch)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            return None
        end = asyncio.get_running_loop().create_future()
        end.set_result(self.answer)
        return end


@pytest.fixture
async def errors() -> AsyncIterator[list[BaseException]]:
    """What reaches the handler of the event loop, which ends the agent."""
    found: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: found.append(context["exception"]))
    yield found
    loop.set_exception_handler(None)


async def ask(folder: Path, launches: Any, request: bytes) -> bytes:
    """Return all that a process gets for this request, which it sends with three descriptors."""
    server = LaunchServer(folder / "launches", launches)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(folder / "launches"))
            socket.send_fds(peer, [request], [null] * 3)
            peer.setblocking(False)
            answer = b""
            while received := await asyncio.get_running_loop().sock_recv(peer, 65536):
                answer += received
            return answer
    finally:
        server.close()
        os.close(null)


def open_descriptors() -> int:
    gc.collect()  # what earlier tests have left open ends now, and not between two counts
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(("answer", "expected"), [(7, {"code": 7}), (None, {"become": True})])
async def test_a_launcher_gets_the_answer(
    answer: int | None, expected: dict[str, Any], tmp_path: Path, errors: list[BaseException]
) -> None:
    launches = FakeLaunches(answer)
    assert json.loads(await ask(tmp_path, launches, json.dumps(REQUEST).encode() + b"\n")) == expected
    launch = launches.begun[0]
    assert (launch.caller.program, launch.caller.env) == (("/bin/true",), {"A": "1"})
    assert not errors


async def test_a_refused_launcher_gets_the_reason(tmp_path: Path, errors: list[BaseException]) -> None:
    launches = FakeLaunches(RefusedLaunchError("two launchers"))
    assert json.loads(await ask(tmp_path, launches, json.dumps(REQUEST).encode() + b"\n")) == {
        "refused": "two launchers"
    }
    assert not errors


@pytest.mark.parametrize(
    "request_line", [b"\n", b"[]\n", b"{}\n", b"\xff\n", b'{"event": "launch"}\n', b'{"event": "other"}\n']
)
async def test_a_bad_request_closes_its_connection(
    request_line: bytes, tmp_path: Path, errors: list[BaseException]
) -> None:
    before = open_descriptors()
    assert await ask(tmp_path, FakeLaunches(0), request_line) == b""
    assert open_descriptors() == before  # what came with it is closed
    assert not errors


@pytest.mark.parametrize("mistake", [KeyError("stage"), OSError(24, "no descriptor"), TypeError("x"), ValueError("x")])
async def test_a_mistake_of_the_agent_is_seen(mistake: Exception, tmp_path: Path, errors: list[BaseException]) -> None:
    assert await ask(tmp_path, FakeLaunches(mistake), json.dumps(REQUEST).encode() + b"\n") == b""
    assert errors == [mistake]

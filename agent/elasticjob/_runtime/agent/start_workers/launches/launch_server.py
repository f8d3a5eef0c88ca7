"""The agent's side of launchers that start by exec in a pod's command (`in_workers/hand_over.py` is the other side).

One connection is one request: a line of JSON, in which `event` is `rank`, `refuse` or `launch`. The answer is a line of
JSON too. A launcher that waits sends the numbers of the signals that it gets, one byte each.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticjob._runtime.agent.processes import peer_pid
from elasticjob._runtime.agent.start_workers.command import PlainCommand, UserCommand
from elasticjob._runtime.agent.start_workers.launches.pending_launch import (
    Launch,
    Launches,
    RefusedLaunchError,
    receive_streams,
    relay_until_end,
)
from elasticjob._runtime.agent.start_workers.shims.shim_callers import read_process
from elasticjob._runtime.contract.commands.python_command import is_python, parse_python_command
from elasticjob._runtime.system.sockets.local_listener import LocalListener, until_readable

MAX_REQUEST = 8 << 20
"""Bytes. The kernel allows 6 MiB of arguments and environment."""


class LaunchServer:
    """Listens on `path` for the processes of the pod's command."""

    def __init__(self, path: Path, launches: Launches) -> None:
        self._launches = launches
        self._loop = asyncio.get_running_loop()
        self._listener = LocalListener(path, self._serve)

    def close(self) -> None:
        """Stop listening, and cancel the tasks that serve launchers."""
        self._listener.close()

    async def _serve(self, peer: socket.socket) -> None:
        descriptors: list[int] = []
        try:
            request = await _receive(peer, descriptors)
            launch = _launch(peer, request, descriptors) if request["event"] == "launch" else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # it has ended, or is not a launcher
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            answer = await self._answer(request) if launch is None else await self._wait(peer, launch)
        except RefusedLaunchError as error:
            answer = {"refused": str(error)}
        if answer is not None:
            with suppress(OSError):
                await self._loop.sock_sendall(peer, json.dumps(answer).encode() + b"\n")

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request of a process that does not wait for ranks; None if it is unknown."""
        match request["event"]:
            case "rank":
                await self._launches.rank_begins()
                return {}
            case "refuse":
                self._launches.refuse(str(request.get("message", "")), "SeparateWorldError")
                return {}
            case _:
                return None

    async def _wait(self, peer: socket.socket, launch: Launch) -> dict[str, Any] | None:
        """Return the answer to a launcher; None if it does not wait for it any more."""
        try:
            end = await self._launches.begin(launch)
        except RefusedLaunchError:
            launch.close()
            raise
        if end is None:
            launch.close()
            return {"become": True}
        code = await relay_until_end(peer, launch, end, self._launches)
        return None if code is None else {"code": code}


async def _receive(peer: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Return a request, and add the descriptors that came with it to `descriptors`, also if an error is raised."""
    data = b""
    while not data.endswith(b"\n"):
        await until_readable(peer)
        more, received, _, _ = socket.recv_fds(peer, 1 << 16, 3)
        data += more
        descriptors += received
        if not more or len(data) > MAX_REQUEST or len(descriptors) > 3:
            raise ValueError("the request of a launcher was not received")
    request: dict[str, Any] = json.loads(data)
    return request


def _launch(peer: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> Launch:
    argv = tuple(map(str, request["argv"]))
    env = {str(name): str(value) for name, value in request["env"].items()}
    caller = replace(read_process(peer_pid(peer)), program=argv, env=env)
    options = {str(name): str(value) for name, value in request["log_options"].items()}
    return Launch(
        caller,
        _command(argv),
        str(request["role"]),
        options,
        {str(name): str(value) for name, value in request["variables"].items()},
        bool(request["expands"]),
        receive_streams(descriptors, request["streams"]),
    )


def _command(argv: tuple[str, ...]) -> UserCommand:
    has_macros = any("$" in word for word in argv[1:])
    command = parse_python_command(argv) if is_python(argv[0]) else PlainCommand(argv, f"{argv[0]} is not Python")
    return replace(command, has_macros=has_macros)

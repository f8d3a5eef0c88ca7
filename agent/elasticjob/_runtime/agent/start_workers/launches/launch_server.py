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
from elasticjob._runtime.agent.start_workers.launches.launch import (
    Launch,
    Launches,
    RefusedLaunchError,
    receive_streams,
    relay_until_end,
)
from elasticjob._runtime.agent.start_workers.shims.shim_callers import read_process
from elasticjob._runtime.contract.commands.python_command import is_python, parse_python_command
from elasticjob._runtime.system.loop_errors import background_task

MAX_REQUEST = 8 << 20
"""Bytes. The kernel allows 6 MiB of arguments and environment."""


class LaunchServer:
    """Listens on `path` for the processes of the pod's command."""

    def __init__(self, path: Path, launches: Launches) -> None:
        self._launches = launches
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop listening, and cancel the tasks that serve launchers."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            task = background_task(self._serve(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                answer = await self._answer(peer)
            except RefusedLaunchError as error:
                answer = {"refused": str(error)}
            except (OSError, ValueError, KeyError, TypeError):  # it has ended, or is no launcher
                return
            if answer is not None:
                with suppress(OSError):
                    await self._loop.sock_sendall(peer, json.dumps(answer).encode() + b"\n")

    async def _answer(self, peer: socket.socket) -> dict[str, Any] | None:
        """Return the answer to one request; None if nobody waits for it any more."""
        request, descriptors = await self._receive(peer)
        try:
            match request["event"]:
                case "rank":
                    await self._launches.rank_begins()
                    return {}
                case "refuse":
                    self._launches.refuse(str(request["message"]), "SeparateWorldError")
                    return {}
                case "launch":
                    launch = _launch(peer, request, descriptors)
                    return await self._wait(peer, launch)
                case _:
                    return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _wait(self, peer: socket.socket, launch: Launch) -> dict[str, Any] | None:
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

    async def _receive(self, peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
        data, descriptors = b"", list[int]()
        while not data.endswith(b"\n"):
            await _readable(peer)
            more, received, _, _ = socket.recv_fds(peer, 1 << 16, 3)
            data, descriptors = data + more, [*descriptors, *received]
            if not more or len(data) > MAX_REQUEST or len(descriptors) > 3:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise ValueError("the request of a launcher was not received")
        request = json.loads(data)
        return request, descriptors


def _launch(peer: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> Launch:
    argv = tuple(map(str, request["argv"]))
    env = {str(name): str(value) for name, value in request["env"].items()}
    caller = replace(read_process(peer_pid(peer)), program=argv, env=env)
    options = {str(name): str(value) for name, value in request["log_options"].items()}
    return Launch(
        caller, _command(argv), str(request["role"]), options, receive_streams(descriptors, request["streams"])
    )


def _command(argv: tuple[str, ...]) -> UserCommand:
    has_macros = any("$" in word for word in argv[1:])
    command = parse_python_command(argv) if is_python(argv[0]) else PlainCommand(argv, f"{argv[0]} is not Python")
    return replace(command, has_macros=has_macros)


async def _readable(peer: socket.socket) -> None:
    """Wait until the socket can be read: asyncio cannot receive descriptors."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)

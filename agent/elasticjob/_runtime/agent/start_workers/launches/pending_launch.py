"""What a launcher in a pod's command hands over: the program of its ranks, its attributes, and its options."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticjob._runtime.agent.start_workers.command import UserCommand
from elasticjob._runtime.agent.start_workers.shims.shim_callers import ShimCaller

REFUSED = "RefusedCommandError"
"""The exception of a command that the job cannot run."""


class RefusedLaunchError(Exception):
    """The ranks of this launcher cannot be the pod's workers; the message says what to write instead."""


@dataclass(frozen=True)
class Launch:
    """A launcher that waits for its ranks."""

    caller: ShimCaller
    """The launcher's process, with the environment that its ranks get."""
    command: UserCommand
    """What each rank runs; it may have torchrun's macros."""
    role: str = ""
    """Empty: the job's."""
    log_options: Mapping[str, str] = field(default_factory=dict)
    """Options of logs that the launcher was given: long names of torchrun's options, and their texts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher gives to each rank, and torchrun's names of their values."""
    expands: bool = False
    """Whether the launcher replaces variables such as `$RANK` in the arguments of each rank."""
    streams: tuple[int, int, int] | None = None
    """The launcher's own stdin, stdout and stderr, as descriptors of this process; None: it has closed one of them."""

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.streams or ():
            with suppress(OSError):
                os.close(descriptor)


class Launches(Protocol):
    """What the agent does for the processes of a pod's command. No two commands run at the same time."""

    async def runs_for_each_rank(self) -> bool:
        """Return whether the command runs once for each rank by now, and a Python that it starts is one of them."""

    async def rank_begins(self) -> None:
        """Handle a process that is about to act as a rank; RefusedLaunchError if the command runs once in this pod."""

    async def begin(self, launch: Launch) -> asyncio.Future[int] | None:
        """Start the ranks of a launcher. Return their exit code (negative for a signal), known once all have ended.

        None: the launcher has to become the rank of its process instead. RefusedLaunchError: the job fails. In both
        cases the caller closes the launch, else the callee does.
        """

    def signal(self, launch: Launch, number: int) -> None:
        """Pass a signal that the launcher has got on to its ranks."""

    def lost(self, launch: Launch) -> None:
        """Handle the end of a launcher that still waits for its ranks."""

    def refuse(self, message: str, exception: str = REFUSED) -> None:
        """Fail the job, because a launcher in the command asks for what the job has not. `exception`: its name.

        Nothing happens where the command runs once for each rank: the process has to end with the error.
        """


def receive_streams(descriptors: Sequence[int], numbers: Sequence[int]) -> tuple[int, int, int] | None:
    """Return copies of stdin, stdout and stderr of a process; None if one is closed there.

    `numbers`: those of `descriptors` in that process.
    """
    found = dict(zip(numbers, descriptors, strict=True))
    if not {0, 1, 2} <= found.keys():
        return None
    return os.dup(found[0]), os.dup(found[1]), os.dup(found[2])


async def relay_until_end(
    peer: socket.socket, launch: Launch, end: asyncio.Future[int], launches: Launches
) -> int | None:
    """Pass the signals that the launcher sends, one byte each, on to its ranks until their `end`; return their code.

    None: the launcher has ended before them.
    """
    loop = asyncio.get_running_loop()
    while True:
        received = asyncio.ensure_future(loop.sock_recv(peer, 64))
        try:
            both: tuple[asyncio.Future[Any], ...] = (end, received)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return end.result()
            try:
                numbers = received.result()
            except OSError:
                numbers = b""
        finally:
            received.cancel()
        for number in numbers:
            launches.signal(launch, number)
        if not numbers:
            launches.lost(launch)
            return None

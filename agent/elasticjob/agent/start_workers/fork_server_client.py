"""The agent's side of `warm.warm_process`: start it, have it fork, end it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticjob.agent.processes import die_with_parent, kill
from elasticjob.agent.start_workers.command import PythonCommand
from elasticjob.code_root import CODE_ROOT

IMPORT_TIMEOUT = 600.0
"""Seconds: an image on a slow network disk may need minutes for its imports."""
FORK_TIMEOUT = 30.0

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elasticjob.agent.start_workers.fork_server.main import main; main()"
)


class ForkServerError(Exception):
    """The warm process cannot be used; the message says why."""


def program_fields(command: PythonCommand) -> dict[str, object]:
    """Fields of `run_main.Command`."""
    return {"mode": command.mode.value, "target": command.target, "args": command.args, "argv": command.argv}


class ForkServerClient:
    """The agent's side of `warm_process`."""

    def __init__(
        self,
        interpreter: str,
        flags: Sequence[str],
        command: PythonCommand | None,
        env: Mapping[str, str],
        preload: Sequence[str],
        output: int,
        reserve: int,
        at_once: int,
    ) -> None:
        """`command`: what its workers run that are not told anything else.

        `reserve`: how many workers are forked ahead of need; `at_once`: how many each `fork` is for.
        """
        if command and command.mode.value == "script" and not Path(command.target).is_file():
            raise ForkServerError(f"{command.target} is not a file")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        config = {
            "preload": list(preload),
            "command": command and program_fields(command),
            "reserve": reserve,
            "at_once": at_once,
        }
        argv = [interpreter, *flags, "-c", _START, CODE_ROOT, str(theirs.fileno()), json.dumps(config)]
        try:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise ForkServerError(f"{interpreter}: {error}") from None
        finally:
            theirs.close()
        process.returncode = 0
        self.pid = process.pid
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._alive = True
        self._turn = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """Wait for the imports and the trial; `WarmError` where workers must start by exec."""
        verdict = await self._answer(IMPORT_TIMEOUT)
        if not verdict["ready"]:
            raise ForkServerError(verdict["why"])
        return verdict

    async def fork(self, workers: Sequence[Mapping[str, Any]], descriptors: Sequence[int]) -> list[int]:
        """Their process ids; see `warm_process`. `WarmError` where the process is gone."""
        request = json.dumps({"workers": workers}).encode()
        async with self._turn:
            try:
                socket.send_fds(self._socket, [request], descriptors)
            except OSError as error:
                raise ForkServerError(f"the warm process does not take requests: {error}") from None
            pids: list[int] = (await self._answer(FORK_TIMEOUT))["pids"]
        return pids

    def mark_lost(self) -> None:
        """It has ended; whoever waits for it learns it from the socket."""
        self._alive = False

    def close(self) -> None:
        self._socket.close()
        if self._alive:
            kill([self.pid])

    async def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            data = await asyncio.wait_for(self._loop.sock_recv(self._socket, 1 << 16), timeout)
        except asyncio.TimeoutError:
            raise ForkServerError(f"the warm process did not answer within {timeout:g} s") from None
        except OSError as error:
            raise ForkServerError(f"the warm process is gone: {error}") from None
        if not data:
            raise ForkServerError("the warm process ended")
        answer: dict[str, Any] = json.loads(data)
        return answer

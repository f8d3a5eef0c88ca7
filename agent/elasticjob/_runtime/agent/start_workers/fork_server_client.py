"""The agent's side of the fork server: start the process, request forks, end it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob._runtime.agent.processes import die_with_parent, kill
from elasticjob._runtime.agent.start_workers.command import PythonCommand
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.robust_mutex import HeldMutex, mutex_memory, open_mutex_memory

IMPORT_TIMEOUT = 600.0
"""Seconds. The imports of an image on a slow network disk may take minutes."""
FORK_TIMEOUT = 30.0
"""Seconds."""

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elasticjob._runtime.agent.start_workers.fork_server.main import main; main()"
)


class ForkServerError(Exception):
    """The fork server cannot be used; the message gives the reason."""


class ForkedProcess(NamedTuple):
    """A process that the fork server has forked."""

    pid: int
    mutex: HeldMutex | None
    """None: the process could not lock one."""


def program_fields(command: PythonCommand) -> dict[str, object]:
    """Return the fields of `run_main.Program`."""
    return {"mode": command.mode.value, "target": command.target, "args": command.args, "argv": command.argv}


class ForkServerClient:
    """One fork server process. `fork_server.main` describes the messages."""

    def __init__(
        self,
        interpreter: str,
        flags: Sequence[str],
        command: PythonCommand | None,
        env: Mapping[str, str],
        preload: Sequence[str],
        output: int,
        preforked_workers: int,
        workers_per_fork: int,
        child_setup: Callable[[], None] = die_with_parent,
    ) -> None:
        """Start the process; ForkServerError if it cannot be started.

        `command`: what a worker runs unless its request names another program; None if every request names one.
        `output`: descriptor for the standard output and error of the process.
        `preforked_workers`: how many workers are forked ahead of need.
        `workers_per_fork`: how many workers each `fork` requests.
        `child_setup`: what the process runs before its program.
        """
        if command and command.mode.value == "script" and not Path(command.target).is_file():
            raise ForkServerError(f"{command.target} is not a file")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        mutexes = mutex_memory()
        config = {
            "mutexes": mutexes,
            "preload": list(preload),
            "command": command and program_fields(command),
            "preforked_workers": preforked_workers,
            "workers_per_fork": workers_per_fork,
        }
        argv = [interpreter, *flags, "-c", _START, CODE_ROOT, str(theirs.fileno()), json.dumps(config)]
        try:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), *([] if mutexes is None else [mutexes])),
                start_new_session=True,
                preexec_fn=child_setup,
            )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise ForkServerError(f"{interpreter}: {error}") from None
        finally:
            theirs.close()
            self._mutexes = open_mutex_memory(mutexes)
        process.returncode = 0  # the agent reaps; Popen must not
        self.pid = process.pid
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._alive = True
        self._request_lock = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """Wait for the imports and the self-test and return their result; ForkServerError if either failed."""
        result = await self._receive(IMPORT_TIMEOUT)
        if not result["ready"]:
            raise ForkServerError(result["reason"])
        return result

    async def fork(self, workers: Sequence[Mapping[str, Any]], descriptors: Sequence[int]) -> list[ForkedProcess]:
        """Start workers as forks and return their processes; ForkServerError if the fork server has ended.

        `workers` are `workers` of the request; `descriptors` are those of all workers, in order.
        """
        request = json.dumps({"workers": workers}).encode()
        async with self._request_lock:
            try:
                socket.send_fds(self._socket, [request], descriptors)
            except OSError as error:
                raise ForkServerError(f"the fork server does not accept requests: {error}") from None
            answer = await self._receive(FORK_TIMEOUT)
        mutexes = map(self._mutex, answer["mutexes"])
        return [ForkedProcess(*worker) for worker in zip(answer["pids"], mutexes, strict=True)]

    def _mutex(self, number: int | None) -> HeldMutex | None:
        return HeldMutex(self._mutexes, number) if self._mutexes is not None and number is not None else None

    def mark_lost(self) -> None:
        """Record that the process has ended. A pending request fails by the end of file of the socket."""
        self._alive = False

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        if self._alive:
            kill([self.pid])

    async def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            data = await asyncio.wait_for(self._loop.sock_recv(self._socket, 1 << 16), timeout)
        except asyncio.TimeoutError:
            raise ForkServerError(f"the fork server did not answer within {timeout:g} s") from None
        except OSError as error:
            raise ForkServerError(f"the connection to the fork server was lost: {error}") from None
        if not data:
            raise ForkServerError("the fork server ended")
        message: dict[str, Any] = json.loads(data)
        return message

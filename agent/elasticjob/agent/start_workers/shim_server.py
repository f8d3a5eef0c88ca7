"""The agent's side of `shim`: programs named `python` and `torchrun` for whatever the user's command starts."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from elasticjob.agent.start_workers.command import parse_command, parse_own_agent_command
from elasticjob.agent.start_workers.shim_callers import (
    ExecInstead,
    ForkServerProcess,
    RunInFork,
    ShimCaller,
    fork_or_exec,
    process_attributes,
    read_caller,
    torchrun_interpreter,
)

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 250
_PYTHONS = re.compile(r"python(3(\.\d+)?)?$")

Fork = Callable[[ShimCaller, RunInFork, Sequence[int], Sequence[int]], Awaitable[int]]
"""(caller, what to run, descriptors, their numbers there) -> process id; raises `CannotForkError`."""


class CannotForkError(Exception):
    """The message says why."""


def likely_python(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The Python that a command will most likely run: the first that it names, or the usual one."""
    named = re.findall(r"(?:^|[\s;&|(/])(python[\d.]*|torchrun)(?=$|[\s;&|)])", "\n".join(words))
    for name in (*named, "python", "python3"):
        if path := shutil.which(name, path=env.get("PATH")):
            return shutil.which(torchrun_interpreter(path), path=env.get("PATH")) if name == "torchrun" else path
    return None


class ShimServer:
    """A folder of shims, and who runs them. `folder` is to be first on PATH of what the user's command is."""

    def __init__(
        self, folder: Path, interpreter: str, env: Mapping[str, str], fork: Fork, *, own_agent: bool = False
    ) -> None:
        """OSError where programs in `folder` cannot be executed.

        `own_agent`: `torchrun` is torchrun itself, and not this agent with its script.
        """
        self.folder = folder
        self.workers_python = str(folder / "workers" / Path(interpreter).name)
        """The shim for torchrun's PYTHON_EXEC: it stands for the interpreter, wherever that is."""
        self._interpreter = interpreter
        self._read = parse_own_agent_command if own_agent else parse_command
        self._path = env.get("PATH")
        self._warmth = ForkServerProcess(interpreter, env, process_attributes(os.getpid()))
        self._fork = fork
        self._peers: dict[int, socket.socket] = {}
        """The shim that each forked process's end is to be told to."""
        self._of_torchrun: dict[int, Mapping[str, str]] = {}
        """The environment of those that are workers of a torchrun."""
        self._ended: dict[int, int] = {}
        self._pending = 0
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._write()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(folder / "agent"))
        self._listener.listen(64)
        self._loop.add_reader(self._listener, self._accept)

    @property
    def has_processes(self) -> bool:
        """Whether a process runs that a shim stands for."""
        return bool(self._peers)

    def child_ended(self, pid: int, code: int) -> Mapping[str, str] | None:
        """A child of the agent was reaped; its environment, if it was a worker of a torchrun."""
        if peer := self._peers.pop(pid, None):
            self._tell(peer, b"ended", b"%d" % code)
        elif self._pending:
            self._ended[pid] = code  # faster than the answer that names it
        return self._of_torchrun.pop(pid, None)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _write(self) -> None:
        """One for every name that a shell would find, and torchrun's."""
        workers = Path(self.workers_python)
        workers.parent.mkdir(parents=True)
        (workers.parent / "agent").symlink_to("../agent")
        text = f"#!{sys.executable} -IS\n{files('elasticjob.agent.start_workers').joinpath('shim.py').read_text()}"
        version = f"python{Path(self._interpreter).resolve().name.removeprefix('python')}"
        names = {"python", "python3", "torchrun", version, workers.name}
        found = [n for n in names if shutil.which(n, path=self._path) and (n == "torchrun" or _PYTHONS.match(n))]
        for path in (*(self.folder / name for name in found), workers):
            path.write_text(text)
            path.chmod(0o755)
        if len(sys.executable) > 120 or not os.access(workers, os.X_OK):
            raise PermissionError(f"programs in {self.folder} cannot be executed")

    # ---- one shim ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            task = self._loop.create_task(self._serve(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            await self._stand_in(peer)

    async def _stand_in(self, peer: socket.socket) -> None:
        """From the shim's descriptors to its process; then its signals, until it is gone."""
        descriptors: list[int] = []
        program: tuple[str, ...] = ()
        self._pending += 1
        try:
            numbers, descriptors = await self._offered(peer)
            caller = read_caller(_pid(peer), (self.workers_python, self._interpreter))
            program = caller.program
            verdict = fork_or_exec(caller, self._warmth, torchrun_interpreter(_find(caller, "torchrun")), self._read)
            if isinstance(verdict, ExecInstead):
                log.info("%s starts by exec: %s", program[0], verdict.reason)
                self._tell(peer, b"exec", *map(os.fsencode, verdict.program))
                return
            pid = await self._fork(caller, verdict, descriptors, numbers)
        except (OSError, ValueError, KeyError, CannotForkError) as error:
            log.info("python starts by exec: %s", error)
            self._tell(peer, b"exec", *map(os.fsencode, program))
            return
        finally:
            self._pending -= 1
            for descriptor in descriptors:
                os.close(descriptor)
        self._peers[pid] = peer
        if caller.of_torchrun:
            self._of_torchrun[pid] = caller.env
        if (code := self._ended.pop(pid, None)) is not None:
            self.child_ended(pid, code)
        await self._relay(pid, peer, group=caller.of_torchrun)

    async def _offered(self, peer: socket.socket) -> tuple[list[int], list[int]]:
        await _readable(peer)
        data, descriptors, _, _ = socket.recv_fds(peer, 4096, MAX_DESCRIPTORS)
        numbers = [int(word) for word in data.partition(b"\n")[0].split()]
        if len(numbers) != len(descriptors) or not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("a shim's descriptors did not come")
        return numbers, descriptors

    async def _relay(self, pid: int, peer: socket.socket, *, group: bool) -> None:
        """Pass signals on; a shim that is killed takes its process with it.

        `group`: to all of its process group, as torchrun signals its workers; each process here leads one.
        """
        while self._peers.get(pid) is peer:
            try:
                data = await self._loop.sock_recv(peer, 64)
            except OSError:
                data = b""
            for number in data or bytes((signal.SIGKILL,)):
                if self._peers.get(pid) is peer:  # not yet reaped: the number is still its own
                    _send(pid, number, group=group and bool(data))
            if not data:
                return

    def _tell(self, peer: socket.socket, *words: bytes) -> None:
        """The last words to a shim; it reads up to their end."""
        with suppress(OSError):
            peer.setblocking(True)
            peer.sendall(b"".join(word + b"\0" for word in words))
            peer.shutdown(socket.SHUT_RDWR)


def _find(caller: ShimCaller, name: str) -> str:
    return shutil.which(name, path=caller.env.get("PATH")) or name


def _send(pid: int, number: int, *, group: bool) -> None:
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:  # just forked, it leads no group yet
        os.kill(pid, number)


def _pid(peer: socket.socket) -> int:
    """The process at the other end (SO_PEERCRED)."""
    pid: int = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


async def _readable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)

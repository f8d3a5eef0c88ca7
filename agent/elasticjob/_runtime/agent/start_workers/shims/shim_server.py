"""The agent's side of the shims: `python` and `torchrun` for the processes that the user's command starts."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from elasticjob._runtime.agent.processes import peer_pid
from elasticjob._runtime.agent.start_workers.command import (
    CommandError,
    UserCommand,
    lost_log_options,
    parse_own_agent_command,
    parse_shell_command,
    parse_shell_launch,
    shell_log_options,
    shell_role,
    without_effect,
)
from elasticjob._runtime.agent.start_workers.launches.pending_launch import (
    Launch,
    Launches,
    RefusedLaunchError,
    receive_streams,
    relay_until_end,
)
from elasticjob._runtime.agent.start_workers.shims.shim_callers import (
    ExecInstead,
    ForkServerProcess,
    RunInFork,
    ShimCaller,
    fork_or_exec,
    process_attributes,
    read_caller,
    torchrun_interpreter,
)
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.process_placement import read_placement
from elasticjob._runtime.system.sockets.local_listener import LocalListener, until_readable

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 250
"""Of one message; the kernel's limit is 253."""
_PYTHONS = re.compile(r"python(3(\.\d+)?)?$")

Fork = Callable[[ShimCaller, RunInFork, Sequence[int], Sequence[int]], Awaitable[int]]
"""(caller, decision, descriptors, their numbers in the caller) -> process id; raises CannotForkError."""


class CannotForkError(Exception):
    """The program must start by exec; the message gives the reason."""


def likely_python(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the path of the first Python that a command names, else of `python` or `python3`; None if none exists."""
    named = re.findall(r"(?:^|[\s;&|(/])(python[\d.]*|torchrun)(?=$|[\s;&|)])", "\n".join(argv))
    for name in (*named, "python", "python3"):
        if path := shutil.which(name, path=env.get("PATH")):
            return shutil.which(torchrun_interpreter(path), path=env.get("PATH")) if name == "torchrun" else path
    return None


class ShimServer:
    """Writes a folder of shims and serves the processes that run them.

    The caller puts `folder` first on PATH of the user's command.
    """

    def __init__(
        self,
        folder: Path,
        interpreter: str,
        env: Mapping[str, str],
        fork: Fork,
        *,
        own_agent: bool = False,
        launches: Launches | None = None,
    ) -> None:
        """Write the shims and listen; OSError if programs in `folder` cannot be executed.

        `interpreter` and `env` are those of the fork server; `fork` starts a fork for a caller.
        `own_agent`: the `torchrun` shim runs torchrun itself. Without it, the shim runs torchrun's script.
        `launches`: serves a `torchrun` in a command that runs once in its pod; None: there is no such command.
        """
        self.folder = folder
        self.workers_python = str(folder / "workers" / Path(interpreter).name)
        """Path of the shim for torchrun's PYTHON_EXEC; it stands for `interpreter`."""
        self._interpreter = interpreter
        self._parse = parse_own_agent_command if own_agent else parse_shell_command
        self._path = env.get("PATH")
        self._fork_server = ForkServerProcess(
            interpreter, env, process_attributes(os.getpid()), read_placement(os.getpid())
        )
        self._fork = fork
        self._launches = launches
        self._peers: dict[int, socket.socket] = {}
        """Connection to the shim of each fork, by the fork's process id."""
        self._of_torchrun: dict[int, Mapping[str, str]] = {}
        """Environment of each fork that is a worker of a torchrun, by process id."""
        self._ended: dict[int, int] = {}
        """Exit codes of children that were reaped before the answer of `fork` named them."""
        self._notes: set[str] = set()
        """What has been logged about options."""
        self._pending = 0
        """How many shims wait for a decision or a fork."""
        self._loop = asyncio.get_running_loop()
        self._write_shims()
        self._listener = LocalListener(folder / "agent", self._run_shim)

    @property
    def has_processes(self) -> bool:
        """Whether a fork runs that acts for a shim."""
        return bool(self._peers)

    def decide(self, caller: ShimCaller, command: UserCommand) -> RunInFork | ExecInstead:
        """Decide whether a fork can run a command with the attributes of this process."""
        return fork_or_exec(caller, self._fork_server, "", lambda *_: command)

    def child_ended(self, pid: int, code: int) -> Mapping[str, str] | None:
        """Handle a reaped child of the agent. Return its environment if it was a worker of a torchrun."""
        if peer := self._peers.pop(pid, None):
            self._answer(peer, b"ended", b"%d" % code)
        elif self._pending:
            self._ended[pid] = code
        return self._of_torchrun.pop(pid, None)

    def close(self) -> None:
        """Stop listening, and cancel the tasks that serve shims."""
        self._listener.close()

    def _write_shims(self) -> None:
        """Write a shim for each name of Python and torchrun that exists on PATH, and one for torchrun's workers."""
        workers = Path(self.workers_python)
        workers.parent.mkdir(parents=True)
        (workers.parent / "agent").symlink_to("../agent")
        source = files(__package__).joinpath("shim.py").read_text()
        text = f"#!{sys.executable} -IS\n{source}"
        version = f"python{Path(self._interpreter).resolve().name.removeprefix('python')}"
        names = {"python", "python3", "torchrun", version, workers.name}
        found = [n for n in names if shutil.which(n, path=self._path) and (n == "torchrun" or _PYTHONS.match(n))]
        for path in (*(self.folder / name for name in found), workers):
            path.write_text(text)
            path.chmod(0o755)
        if len(sys.executable) > 120 or not os.access(workers, os.X_OK):
            raise PermissionError(f"programs in {self.folder} cannot be executed")

    # ---- one shim ------------------------------------------------------------------------------------------------

    async def _run_shim(self, peer: socket.socket) -> None:
        """Fork a process for one shim, then relay signals until the process ends; or let the shim exec its program."""
        descriptors: list[int] = []
        program: tuple[str, ...] = ()
        self._pending += 1
        try:
            numbers, descriptors = await self._receive_descriptors(peer)
            caller = read_caller(peer_pid(peer), (self.workers_python, self._interpreter))
            program = caller.program
            if Env.LAUNCHES in caller.env and self._launches is not None:
                launched, caller = await self._run_once(peer, caller, self._launches, descriptors, numbers)
                if launched:
                    return
            role: tuple[str, ...] = ()
            if self._parse is parse_shell_command:
                self._note(lost_log_options(caller.program, caller.env))
                if name := shell_role(program, caller.env):
                    caller = replace(caller, env={**caller.env, "ROLE_NAME": name})
                    role = ("env", f"ROLE_NAME={name}")
            torchrun_python = torchrun_interpreter(_find(caller, "torchrun"))
            decision = fork_or_exec(caller, self._fork_server, torchrun_python, self._parse)
            if isinstance(decision, RunInFork) and Env.LAUNCHES in caller.env:
                decision = ExecInstead(decision.command.argv, "the command runs once in this pod")
            if isinstance(decision, ExecInstead):
                log.info("%s starts by exec: %s", program[0], decision.reason)
                self._answer(peer, b"exec", *map(os.fsencode, (*role, *decision.program)))
                return
            program = decision.command.argv  # in place of a torchrun, its script
            pid = await self._fork(caller, decision, descriptors, numbers)
        except (OSError, ValueError, LookupError, CannotForkError) as error:  # the shim may have been killed meanwhile
            log.info("python starts by exec: %s", error)
            self._answer(peer, b"exec", *map(os.fsencode, program))
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

    async def _run_once(
        self,
        peer: socket.socket,
        caller: ShimCaller,
        launches: Launches,
        descriptors: Sequence[int],
        numbers: Sequence[int],
    ) -> tuple[bool, ShimCaller]:
        """Serve a shim in a command that may run once in its pod. Return whether that is done, and the caller.

        The caller has no `Env.LAUNCHES` any more if the command runs once for each rank.
        """
        torchrun_python = torchrun_interpreter(_find(caller, "torchrun"))
        try:
            command = parse_shell_launch(caller.program, torchrun_python, caller.env)
        except CommandError as error:  # the shell must not go on after it
            launches.refuse(str(error))
            return False, caller
        if command is not None:
            self._note(without_effect(caller.program, caller.env))
            role = shell_role(caller.program, caller.env)
            options = shell_log_options(caller.program, caller.env)
            launch = Launch(caller, command, role, options, streams=receive_streams(descriptors, numbers))
            if await self._hand_over(peer, launch, launches):
                return True, caller
            is_rank = True
        else:
            is_rank = await launches.runs_for_each_rank()
        if not is_rank:
            return False, caller
        return False, replace(caller, env={name: v for name, v in caller.env.items() if name != Env.LAUNCHES})

    async def _hand_over(self, peer: socket.socket, launch: Launch, launches: Launches) -> bool:
        """Let the agent run a torchrun's ranks, and answer the shim once they have ended. False: it becomes a rank."""
        self._pending -= 1  # none of its forks acts for this shim
        try:
            end = await launches.begin(launch)
            code = 1 if end is None else await relay_until_end(peer, launch, end, launches)
        except RefusedLaunchError as error:
            log.error("%s", error)
            end, code = None, 1
            self._answer(peer, b"ended", b"1")
            launch.close()
            return True
        finally:
            self._pending += 1
        if end is None:
            launch.close()
        elif code is not None:
            self._answer(peer, b"ended", b"%d" % code)
        return end is not None

    def _note(self, text: str) -> None:
        """Log a text about options of a torchrun once."""
        if text and text not in self._notes:
            self._notes.add(text)
            log.info("%s", text)

    async def _receive_descriptors(self, peer: socket.socket) -> tuple[list[int], list[int]]:
        """Return the descriptors' numbers in the shim, and the descriptors."""
        await until_readable(peer)
        data, descriptors, _, _ = socket.recv_fds(peer, 4096, MAX_DESCRIPTORS)
        numbers = [int(number) for number in data.partition(b"\n")[0].split()]
        if len(numbers) != len(descriptors) or not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("the descriptors of a shim were not received")
        return numbers, descriptors

    async def _relay(self, pid: int, peer: socket.socket, *, group: bool) -> None:
        """Relay the shim's signals to its fork. If the shim was killed, kill the fork.

        `group`: signal the fork's process group, as torchrun signals its workers. Each fork leads one.
        """
        while self._peers.get(pid) is peer:
            try:
                data = await self._loop.sock_recv(peer, 64)
            except OSError:
                data = b""
            for number in data or bytes((signal.SIGKILL,)):
                if self._peers.get(pid) is peer:  # not reaped yet: no other process can have this id
                    send_signal(pid, number, group=group and bool(data))
            if not data:
                return

    def _answer(self, peer: socket.socket, *fields: bytes) -> None:
        """Send the only answer to a shim, and shut the connection down: the shim reads to the end of file."""
        with suppress(OSError):
            peer.setblocking(True)
            peer.sendall(b"".join(field + b"\0" for field in fields))
            peer.shutdown(socket.SHUT_RDWR)


def _find(caller: ShimCaller, name: str) -> str:
    return shutil.which(name, path=caller.env.get("PATH")) or name


def send_signal(pid: int, number: int, *, group: bool) -> None:
    """Send a signal, if there is one of this number and the process may get it."""
    with suppress(OSError):
        try:
            (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:  # forked just now: it leads no group yet
            os.kill(pid, number)

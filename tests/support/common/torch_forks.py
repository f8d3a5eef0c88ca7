"""Processes that are forks of one that has imported torch: the import takes 2.5 seconds of processor time.

Run as a program, this is the process that they are forks of.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class Fork(subprocess.Popen[str]):
    """A process that another one has started. Its exit code arrives on the pipe `status`."""

    def __init__(self, args: Sequence[str], pid: int, stdout: int, status: int) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin, self.stdout, self.stderr = None, os.fdopen(stdout, errors="replace"), None
        self._status = os.fdopen(status)

    def poll(self, timeout: float | None = 0) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._status:
                self.returncode = int(self._status.read())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


StartFork = Callable[[Sequence[str], Mapping[str, str]], Fork]
"""Run `python SCRIPT ARGUMENT...` in a fork, with an environment."""


@contextmanager
def torch_forks() -> Iterator[StartFork]:
    """Import torch in a process, and yield what starts forks of it. Their standard error goes to standard output."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(command: Sequence[str], env: Mapping[str, str]) -> Fork:
        pipes = os.pipe(), os.pipe()
        socket.send_fds(control, [json.dumps([command[1:], dict(env)]).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return Fork(command, int(control.recv(64)), *(read for read, _ in pipes))

    command, environ = [sys.executable, __file__, str(theirs.fileno())], {**os.environ, "OMP_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    with process, control:
        yield start


def serve(control: socket.socket) -> list[str]:
    """Answer requests until the tests close the socket. Return in forks only, with the arguments of each."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not request:
            with suppress(ChildProcessError):
                while os.wait():  # the processor time of all forks counts as that of the tests
                    pass
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    output, status = descriptors
    if pid := os.fork():
        os.close(output)
        control.send(str(pid).encode())
        control.close()
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    for number in (1, 2):
        os.dup2(output, number)
    for descriptor in (output, status, control.detach()):
        os.close(descriptor)
    arguments, environ = json.loads(request)
    os.environ.clear()
    os.environ.update(environ)
    return list(arguments)


if __name__ == "__main__":
    import torch.distributed  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has only one of these threads"
    gc.freeze()
    sys.argv[:] = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""What `python` and `torchrun` are inside `bash -c "..."`: a stand-in for a process forked from the warm one.

The agent writes this text to a folder that comes first on PATH, under those names, with a first line that names its
own interpreter (`-I -S`). It imports built-in modules only, to start in half the time of `python -c pass`.

It hands its open descriptors to the agent, which reads all else in /proc, passes signals on, and ends as that process
does. Where the agent says so, or is not there, it becomes the program that it stands for.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import posix
import sys

RELAYED = (1, 2, 3, 10, 12, 15, 18, 28)
"""SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM, SIGCONT, SIGWINCH."""


def main() -> None:
    folder, _, name = sys.argv[0].rpartition("/")
    agent = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    received: list[int] = []
    try:
        agent.connect(f"{folder}/agent")
        relay(agent, received)
        offer(agent)
        words = hear(agent)
    except OSError:
        words = [b"exec"]
    if words[0] == b"exec":
        become(folder, words[1:] or [encode(word) for word in (name, *sys.argv[1:])], received)
    posix._exit(1)  # the agent is gone, and what it forked with it


def relay(agent: _socket.socket, received: list[int]) -> None:
    """Signals are the other process's from now on; those that are ignored stay so, there too."""

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        agent.send(bytes((number,)))

    for number in RELAYED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, pass_on)


def offer(agent: _socket.socket) -> None:
    """All descriptors that a program would inherit, and their numbers."""
    numbers = []
    for text in posix.listdir("/proc/self/fd"):
        try:
            if posix.get_inheritable(int(text)):
                numbers.append(int(text))
        except OSError:
            continue  # the one that the list was read from
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    words = b" ".join(b"%d" % number for number in numbers)
    agent.sendmsg([words + b"\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])


def hear(agent: _socket.socket) -> list[bytes]:
    """The agent's words, each ended by a zero byte; does not return once a process has ended in our place."""
    said = b""
    while data := agent.recv(65536):
        said += data
    words = said.split(b"\0")[:-1] or [b""]
    if words[0] == b"ended":
        end(int(words[1]))
    return words


def become(folder: str, program: list[bytes], received: list[int]) -> None:
    """The program, searched for further down PATH."""
    for number in RELAYED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    for number in received:
        posix.kill(posix.getpid(), number)
    environ = dict(posix.environ)
    folders = [entry for entry in environ.get(b"PATH", b"").split(b":") if entry != encode(folder)]
    environ[b"PATH"] = b":".join(folders)
    for entry in [b""] if b"/" in program[0] else folders:
        try:
            posix.execve(entry + b"/" + program[0] if entry else program[0], program, environ)
        except OSError as error:
            if error.errno not in (2, 13, 20):  # ENOENT, EACCES, ENOTDIR
                break
    posix.write(2, program[0] + b": command not found\n")
    posix._exit(127)


def encode(text: str) -> bytes:
    return text.encode(sys.getfilesystemencoding(), "surrogateescape")


def end(code: int) -> None:
    """As the other process did: by its exit code, or by its signal (negative), without a second core dump."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (9, 19):
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
    posix._exit(code & 0xFF)


if __name__ == "__main__":
    main()

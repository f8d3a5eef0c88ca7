"""The program `python` or `torchrun` inside `bash -c "..."`: it stands for a process that the fork server forks.

The agent writes this text under those names to a folder that comes first on PATH. The first line of each copy names
the agent's own interpreter (`-I -S`). The text imports built-in modules only and so starts in half the time of
`python -c pass`.

The shim sends its open descriptors to the agent, which reads everything else about it from /proc. The shim then relays
signals to the fork and ends as the fork ends. If the agent refuses, or no agent answers, the shim executes the program
that it stands for.
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
        relay_signals(agent, received)
        send_descriptors(agent)
        answer = receive_answer(agent)
    except OSError:
        answer = [b"exec"]
    if answer[0] == b"exec":
        exec_program(folder, answer[1:] or [encode_argument(word) for word in (name, *sys.argv[1:])], received)
    posix._exit(1)  # the agent has ended, and with it the fork


def relay_signals(agent: _socket.socket, received: list[int]) -> None:
    """Relay signals to the fork from now on, and record them. Ignored signals stay ignored here and in the fork."""

    def relay(number: int, _frame: object) -> None:
        received.append(number)
        agent.send(bytes((number,)))

    for number in RELAYED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, relay)


def send_descriptors(agent: _socket.socket) -> None:
    """Send all inheritable descriptors and their numbers."""
    numbers = []
    for name in posix.listdir("/proc/self/fd"):
        try:
            if posix.get_inheritable(int(name)):
                numbers.append(int(name))
        except OSError:
            continue  # the descriptor that listdir used
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    text = b" ".join(b"%d" % number for number in numbers)
    agent.sendmsg([text + b"\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])


def receive_answer(agent: _socket.socket) -> list[bytes]:
    """Return the agent's answer, split at its zero bytes. Ends this process if the answer is that the fork ended."""
    data = b""
    while received := agent.recv(65536):
        data += received
    answer = data.split(b"\0")[:-1] or [b""]
    if answer[0] == b"ended":
        end_like_fork(int(answer[1]))
    return answer


def exec_program(folder: str, program: list[bytes], received: list[int]) -> None:
    """Execute the program, found on PATH without `folder`. Signals received so far are delivered to it."""
    for number in RELAYED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    for number in received:
        posix.kill(posix.getpid(), number)
    environ = dict(posix.environ)
    folders = [entry for entry in environ.get(b"PATH", b"").split(b":") if entry != encode_argument(folder)]
    environ[b"PATH"] = b":".join(folders)
    for entry in [b""] if b"/" in program[0] else folders:
        try:
            posix.execve(entry + b"/" + program[0] if entry else program[0], program, environ)
        except OSError as error:
            if error.errno not in (2, 13, 20):  # ENOENT, EACCES, ENOTDIR
                break
    posix.write(2, program[0] + b": command not found\n")
    posix._exit(127)


def encode_argument(text: str) -> bytes:
    """Return the bytes of a command line argument, also where they are not valid text."""
    return text.encode(sys.getfilesystemencoding(), "surrogateescape")


def end_like_fork(code: int) -> None:
    """End with the fork's exit code, or by its signal (negative) but without a second core dump."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (9, 19):
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
    posix._exit(code & 0xFF)


if __name__ == "__main__":
    main()

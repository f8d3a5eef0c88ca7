"""A launcher in a command that runs once in its pod: the agent starts its ranks, and the launcher waits for them.

The socket in ELASTICJOB_LAUNCHES leads to the agent (`launches/launch_server.py`). Ranks do not have the variable.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

from .one_world import LAUNCHES, SeparateWorldError, fail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_RELAYED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")


def begin_as_rank() -> None:
    """Let the agent know that this process is about to act as the rank of its environment.

    SeparateWorldError: the command runs once in its pod by now, and no process of it is a rank.
    """
    if LAUNCHES not in os.environ:
        return
    answer = _ask({"event": "rank"})
    if message := answer.get("refused"):
        fail(str(message))
    del os.environ[LAUNCHES]


def hand_over(
    argv: Sequence[str],
    check: Callable[[], None],
    *,
    role: str = "",
    log_options: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    expands: bool = False,
) -> int | None:
    """Let the agent run this program as the ranks of the pod, and return its exit code once all of them have ended.

    None: this process has to become the rank of its environment. `check` raises SeparateWorldError if the launcher
    asks for what the job has not. The others are as in `launches.pending_launch.Launch`.
    """
    try:
        check()
    except SeparateWorldError as error:
        _ask({"event": "refuse", "message": str(error)})
        time.sleep(60)  # the agent kills the command within seconds: it must not go on
        raise
    request = {
        "event": "launch",
        "argv": list(argv),
        "role": role,
        "log_options": dict(log_options or {}),
        "variables": dict(variables or {}),
        "expands": expands,
        "env": dict(os.environ),
    }
    answer = _ask(request, waits=True)
    if message := answer.get("refused"):
        fail(str(message))
    if answer.get("become"):
        del os.environ[LAUNCHES]
        return None
    return int(answer["code"])


def _ask(request: dict[str, Any], *, waits: bool = False) -> dict[str, Any]:
    """Send a request and return the answer. `waits`: with this process's streams; relay its signals until then."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = [number for number in (0, 1, 2) if _is_open(number)] if waits else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        try:
            agent.connect(os.environ[LAUNCHES])
            data = json.dumps({**request, "streams": streams}).encode() + b"\n"
            sent = socket.send_fds(agent, [data], streams) if streams else 0
            agent.sendall(data[sent:])
            with _relayed(agent, waits):
                answer = b""
                while received := agent.recv(65536):
                    answer += received
        except OSError as error:
            raise RuntimeError(f"the agent of this pod cannot be reached: {error}") from error
    if not answer:  # the agent ends, and with it this process
        raise RuntimeError("the agent of this pod has ended")
    found: dict[str, Any] = json.loads(answer)
    return found


class _relayed:  # noqa: N801  # a context manager
    """Relays the signals of this process to its ranks, except those that it ignores."""

    def __init__(self, agent: socket.socket, waits: bool) -> None:
        self._agent = agent
        self._before: dict[int, Any] = {}
        is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
        self._numbers = [getattr(signal, name) for name in _RELAYED] if waits and is_main else []

    def __enter__(self) -> None:
        for number in self._numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._relay)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _relay(self, number: int, _frame: object) -> None:
        self._agent.send(bytes((number,)))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

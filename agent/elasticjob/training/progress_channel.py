"""A training process and its agent: `progress(step)` costs a few hundred nanoseconds and no system call.

The agent is found by a socket that the environment names, so it does not matter how the process was started. Processes
that this one forks (data loaders, say) report nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns

from elasticjob.contract.names import STACK_DUMP_SIGNAL, Env
from elasticjob.contract.progress_page import HOLD, PageWord, open_page
from elasticjob.training import own_time

_STEP, _TIME, _LIMIT = int(PageWord.STEP), int(PageWord.TIME), int(PageWord.LIMIT)
_PULSES, _PULSE_TIME = int(PageWord.HEARTBEATS), int(PageWord.HEARTBEAT_TIME)
_TIMEOUT = 5.0
"""Seconds that the first call waits for an agent that is busy."""
_MAX_DESCRIPTORS = 8

_opened = False
_words: memoryview | None = None
_socket: socket.socket | None = None
_memory: tuple[int, ...] = ()
_callbacks: list[Callable[[], object]] = []


class Stopped(SystemExit):
    """Raised by `progress` at the last step of a round that ends on plan; the process should end with it."""


def progress(step: int) -> None:
    """Report that `step` is done: a whole number, 0 or more, that grows by the same amounts on every rank.

    Call it once a step on every rank, from the main thread. Where the round ends on plan (a node joins, leaves or is
    told to go) all ranks return from the same steps; at the last of them this runs what `on_stop` registered and
    raises `Stopped`. Does nothing where no agent of ours started this process.
    """
    if not _opened:
        _open()
    words = _words
    if words is None:
        return
    words[_STEP] = step
    words[_TIME] = monotonic_ns()
    if step >= words[_LIMIT]:
        _hold(words, step)


def heartbeat() -> None:
    """A sign of life where the script reports no steps: an optimizer has made one."""
    if not _opened:
        _open()
    words = _words
    if words is not None:
        words[_PULSES] += 1
        words[_PULSE_TIME] = monotonic_ns()


def on_stop(save: Callable[[], object]) -> None:
    """Call `save` on every rank after the last step of a round that ends on plan, in the order of registration."""
    _callbacks.append(save)


def node_memory() -> tuple[int, ...]:
    """Descriptors of the memory that the agent keeps for this node from round to round; none without an agent."""
    if not _opened:
        _open()
    return _memory


def _hold(words: memoryview, step: int) -> None:
    """Wait until it is known which step is the last; come back if it is a later one."""
    while step >= (limit := words[_LIMIT]):
        if limit != HOLD:
            for save in _callbacks:
                save()
            words[PageWord.STOPPED] = 1
            atexit.register(_end_at_once)
            raise Stopped(0)
        if _socket is None or not _socket.recv(1):
            return  # the agent is gone, and this process with it


def _end_at_once() -> None:
    """The script's `finally` and atexit are done after this; to take torch apart as well takes Python seconds."""
    atexit.unregister(_end_at_once)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)


def _open() -> None:
    """Meet the agent, once."""
    global _opened, _words, _socket, _memory
    _opened = True
    path, round_id, local_rank = (os.environ.get(n, "") for n in (Env.AGENT_SOCKET, Env.ROUND, "LOCAL_RANK"))
    if not path:
        return
    meeting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        meeting.settimeout(_TIMEOUT)
        meeting.connect(path)
        meeting.sendall(json.dumps({"local_rank": int(local_rank), "round": round_id}).encode() + b"\n")
        _, descriptors, _, _ = socket.recv_fds(meeting, 1, _MAX_DESCRIPTORS)
        if descriptors:
            meeting.settimeout(None)
            page, *memory = descriptors
            for descriptor in memory:
                os.set_inheritable(descriptor, False)
            _words, _socket, _memory = open_page(page), meeting, tuple(memory)
            os.close(page)
            own_time.measure(_words)
            _show_stacks()
            return
    except (OSError, ValueError):
        pass  # another round's environment, or no agent any more
    meeting.close()


def _show_stacks() -> None:
    """Write the stacks of all threads when the agent asks, also where Python hangs in a call into C."""
    if path := os.environ.get(Env.STACK_DUMP_FILE):
        import faulthandler

        with suppress(OSError, ValueError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            faulthandler.register(STACK_DUMP_SIGNAL, file=file, all_threads=True)
            atexit.register(_end)


def _end() -> None:
    if _words is not None:
        _words[PageWord.ENDING] = 1


def _forget() -> None:
    """In a process forked from the one that met the agent: it is not the rank."""
    global _opened, _words, _socket, _memory
    if _words is None:
        return
    _opened, _words = True, None
    if _socket is not None:
        _socket.close()
        _socket = None
    for descriptor in _memory:
        with suppress(OSError):
            os.close(descriptor)
    _memory = ()


os.register_at_fork(after_in_child=_forget)

"""The connection of a training process to its agent. `progress(step)` takes a few hundred nanoseconds, no system call.

The environment names the agent's socket, so the connection does not depend on how the process was started. Processes
that the training process forks (data loaders, say) report nothing.
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic_ns
from typing import SupportsFloat, SupportsIndex

from elasticjob._runtime.contract.names import BEFORE_ROUNDS, STACK_DUMP_SIGNAL, Env
from elasticjob._runtime.contract.shared_memory.progress_page import (
    HOLD,
    MAX_TEXT,
    NO_LIMIT,
    PageWord,
    open_page,
    write_text,
)
from elasticjob._runtime.system.process_end import end_at_once
from elasticjob.training import compute_time
from elasticjob.training.devices import synchronize_device
from elasticjob.training.update_guard import guard

_STEP, _TIME, _LIMIT = int(PageWord.STEP), int(PageWord.TIME), int(PageWord.LIMIT)
_HEARTBEATS, _HEARTBEAT_TIME = int(PageWord.HEARTBEATS), int(PageWord.HEARTBEAT_TIME)
_TIMEOUT = 5.0
"""Seconds that the first call waits for a busy agent."""
_MAX_DESCRIPTORS = 16
_DESCRIBE_NANOSECONDS = 1_000_000_000
"""How often the values of metrics are read: reading one from a GPU waits for its queued work."""
_NEVER = 1 << 63

_opened = False
_words: memoryview | None = None
_describe_at = _NEVER
"""When `progress` next writes `total` and `metrics`, as PageWord.TIME."""
_socket: socket.socket | None = None
_memory: tuple[int, ...] = ()
_callbacks: list[Callable[[], object]] = []
_keep_state: Callable[[], object] | None = None
process_stays = False
"""Whether this process outlives the round, so that its objects need not be copied at a planned end."""
_dumps_stacks = False


class Stopped(SystemExit):
    """Raised by `progress` at the last step of a round that ends on plan; the process should exit with it."""


def progress(step: int, total: SupportsIndex | None = None, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
    """Report that `step` is done: an integer, 0 or more, that grows by the same amounts on every rank.

    `total` is the number of steps of the whole training. `metrics` are numbers or tensors of one element, by name. Rank
    0 reports both to `status.trainerStatus`; it reads them once a second, and at the last step. TypeError: `total` is
    no whole number, or a metric is no number. ValueError: too many metrics.

    Call it once a step on every rank, from the main thread. If the round ends on plan (a node joins, leaves or is
    drained), all ranks stop after the same step: there this runs the callbacks of `on_stop` and raises `Stopped`.
    Without an elasticjob agent this does nothing.
    """
    if not _opened:
        _open()
    words = _words
    if words is None:
        return
    words[_STEP] = step
    words[_TIME] = now = monotonic_ns()
    if (total is not None or metrics is not None) and (now >= _describe_at or step == total):
        _describe(words, step, now, total, metrics or {})
    if step >= words[_LIMIT]:
        _stop_or_continue(words, step)


def report_begin(step: int) -> None:
    """Report the step at which the round begins, as `progress` does: the agent knows that it is not of this round."""
    if not _opened:
        _open()
    if _words is not None:
        _words[PageWord.BEGIN_STEP], _words[PageWord.BEGIN_TIME] = step, monotonic_ns()
    progress(step)


def report_received(size: int, seconds: float, interface: str) -> None:
    """Report that this rank has received a state of `size` bytes from another one; `interface`: empty if unknown."""
    received = {"size": size, "seconds": seconds, "interface": interface, "rank": int(os.environ.get("RANK", "0"))}
    with suppress(OSError, KeyError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        connection.connect(os.environ[Env.AGENT_SOCKET])
        connection.sendall(json.dumps({"received": received, "round": os.environ[Env.ROUND]}).encode() + b"\n")


def heartbeat() -> None:
    """Report a step that an optimizer or a State has counted, for scripts that do not call `progress`."""
    if not _opened:
        _open()
    words = _words
    if words is not None:
        words[_HEARTBEATS] += 1
        words[_HEARTBEAT_TIME] = monotonic_ns()


def deadline() -> float | None:
    """Return the seconds until this process must have ended, 0.0 if they are over; None while nothing ends it.

    The process must end because its pod does (a deletion, an eviction, a drain, a shutdown of the machine), because the
    end of its machine is announced with a time, because the round ends on plan, or because another rank has failed. The
    value differs between ranks. It may fall at any time, and is None again in the next round of a process that stays on
    a machine that stays. Without an elasticjob agent it is None.
    """
    if not _opened:
        _open()
    words = _words
    if words is None or not 0 < (at := words[PageWord.DEADLINE]) < NO_LIMIT:  # 0: an older agent sets none
        return None
    return max(0.0, (at - monotonic_ns()) / 1e9)


def on_stop(save: Callable[[], object]) -> None:
    """Call `save` on every rank after the last step of a round that ends on plan, in the order of registration."""
    _callbacks.append(save)


def at_process_end(keep_state: Callable[[], object]) -> None:
    """Let `keep_state` run when a process that has outlived its last round ends; it replaces an earlier one."""
    global _keep_state
    _keep_state = keep_state


def keep_state() -> None:
    """Run what `at_process_end` was called with: the node's memory outlives this process."""
    if _keep_state is not None:
        _keep_state()


def node_memory() -> tuple[int, ...]:
    """Return the descriptors of the memory that the agent keeps for this node across rounds; () without an agent."""
    if not _opened:
        _open()
    return _memory


def callbacks() -> int:
    """Return the number of callbacks that are registered."""
    return len(_callbacks)


def begin_round(kept_callbacks: int) -> None:
    """Connect anew for the round in the environment, with the next report; keep the first so many callbacks.

    The node's memory stays the same.
    """
    global _opened, _words, _socket, _describe_at
    del _callbacks[kept_callbacks:]
    atexit.unregister(_end_at_once)  # of a planned end: this process goes on, and may fail later
    _opened, _words, _describe_at = False, None, _NEVER
    if _socket is not None:
        _socket.close()
        _socket = None


def is_ahead() -> bool:
    """Return whether the agent has started this process ahead of its first round, which has not begun yet."""
    return os.environ.get(Env.ROUND, "").startswith(f"{BEFORE_ROUNDS.attempt}.")


def _describe(
    words: memoryview, step: int, now: int, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
) -> None:
    """Write what the agent reports of the training, if this process is rank 0."""
    global _describe_at
    if _describe_at == _NEVER:
        return
    _describe_at = now + _DESCRIBE_NANOSECONDS
    values = {name: _number(name, value) for name, value in metrics.items()}
    text = json.dumps({"total": total if total is None else _whole_number(total), "metrics": values}).encode()
    if len(text) > MAX_TEXT:
        raise ValueError(f"the metrics need {len(text)} bytes as JSON, at most {MAX_TEXT} are possible: report fewer")
    if words[PageWord.TEXT_VERSION] == 0:
        words[PageWord.FIRST_STEP], words[PageWord.FIRST_TIME] = step, now
    write_text(words, text)


def _whole_number(total: SupportsIndex) -> int:
    try:
        return operator.index(total)
    except TypeError:
        raise TypeError(f"total is {total!r}: use a whole number of steps, or leave it out") from None


def _number(name: str, value: SupportsFloat) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the metric {name!r} is no number: {error}; use a number or a tensor of one element") from None


def _stop_or_continue(words: memoryview, step: int) -> None:
    """Wait until the agent has set the last step. Stop there; return if it is a later step."""
    while step >= (limit := words[_LIMIT]):
        if limit != HOLD:
            synchronize_device()  # the other ranks may wait for a collective that is queued here
            guard.check()  # no callback saves what a broken one has left
            for save in _callbacks:
                save()
            words[PageWord.STOPPED] = 1
            atexit.register(_end_at_once)
            raise Stopped(0)
        if _socket is None or not _socket.recv(1):
            return  # the agent has ended, and this process ends with it


def _end_at_once() -> None:
    """Run the remaining atexit functions and end the process, as a worker that fails does."""
    atexit.unregister(_end_at_once)
    end_at_once(0)


def _open() -> None:
    """Connect to the agent. Later calls of this module use the result, also if there is no agent."""
    global _opened, _words, _socket, _memory, _describe_at
    _opened = True
    path, round_id, local_rank = (os.environ.get(n, "") for n in (Env.AGENT_SOCKET, Env.ROUND, "LOCAL_RANK"))
    if not path:
        return
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT)
        connection.connect(path)
        connection.sendall(json.dumps({"local_rank": int(local_rank), "round": round_id}).encode() + b"\n")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS)
        if descriptors:
            connection.settimeout(None)
            page, *memory = descriptors
            if not _memory:
                _memory = tuple(memory)
                memory = []
            for descriptor in _memory:
                os.set_inheritable(descriptor, False)
            _words, _socket = open_page(page), connection
            _describe_at = 0 if os.environ.get("RANK") == "0" else _NEVER
            for descriptor in (page, *memory):
                os.close(descriptor)
            compute_time.measure(_words)
            if Env.DETECT_HANGS in os.environ:
                enable_stack_dumps()
            return
    except (OSError, ValueError):
        pass  # the environment is of another round, or the agent has ended
    connection.close()


def enable_stack_dumps() -> None:
    """Dump the stacks of all threads on the agent's signal, also if Python hangs in a call into C."""
    global _dumps_stacks
    path = os.environ.get(Env.STACK_DUMP_FILE)
    if path and not _dumps_stacks:
        _dumps_stacks = True
        import faulthandler

        with suppress(OSError, ValueError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            faulthandler.register(STACK_DUMP_SIGNAL, file=file, all_threads=True)
            atexit.register(_mark_ending)


def _mark_ending() -> None:
    if _words is not None:
        _words[PageWord.ENDING] = 1


def _reset_after_fork() -> None:
    """Close the connection in a child process: it is not the rank."""
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


os.register_at_fork(after_in_child=_reset_after_fork)

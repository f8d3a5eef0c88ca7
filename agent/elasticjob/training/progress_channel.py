"""What a training process reports to its agent, and what it asks of it. `progress(step)` makes no system call.

The module's functions act on `channel`, the only object here that has state: it belongs to the process, and connects to
the agent at the first call in each round. Processes that the training process forks (data loaders, say) report nothing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from time import monotonic_ns
from typing import SupportsFloat, SupportsIndex

from elasticjob._runtime.contract.names import PRESTART_ROUND, STACK_DUMP_SIGNAL, Env
from elasticjob._runtime.contract.shared_memory.progress_page import HOLD, NO_LIMIT, PageWord
from elasticjob._runtime.system.process_end import end_at_once
from elasticjob.training import agent_connection, compute_time
from elasticjob.training.agent_connection import AgentConnection
from elasticjob.training.devices import synchronize_device
from elasticjob.training.update_guard import guard

_STEP, _TIME, _LIMIT = int(PageWord.STEP), int(PageWord.TIME), int(PageWord.LIMIT)
_HEARTBEATS, _HEARTBEAT_TIME = int(PageWord.HEARTBEATS), int(PageWord.HEARTBEAT_TIME)


class ChannelState(Enum):
    """Whether a process is connected to its agent."""

    UNOPENED = "unopened"
    """No function has needed the agent in this round yet."""
    CONNECTED = "connected"
    NO_AGENT = "no agent"
    """There is none, or this process is not a rank: reports do nothing until the next round."""


class ProgressChannel:
    """The state of the functions of this module, in one process."""

    def __init__(self) -> None:
        self.state = ChannelState.UNOPENED
        self.connection: AgentConnection | None = None
        """Set while `state` is CONNECTED."""
        self.memory: tuple[int, ...] = ()
        """Descriptors of the memory that the agent keeps for its pod across rounds: those of the first connection."""
        self.callbacks: list[Callable[[], object]] = []
        """What `on_stop` has registered, in this order."""
        self.copy_state: Callable[[], object] | None = None
        """What `at_process_end` has registered."""
        self.process_survives_round = False
        """Whether this process outlives the round, so that its objects need not be copied at a planned end."""
        self._dumps_stacks = False

    def open(self) -> AgentConnection | None:
        """Return the connection of this round; the first call in a round connects. None without an agent."""
        if self.state is ChannelState.UNOPENED:
            self._connect()
        return self.connection

    def _connect(self) -> None:
        self.state = ChannelState.NO_AGENT
        connected = agent_connection.connect_to_agent()
        if connected is None:
            return
        self.state = ChannelState.CONNECTED
        self.connection, memory = connected
        if self.memory:
            for descriptor in memory:
                os.close(descriptor)
        else:
            self.memory = memory
        for descriptor in self.memory:
            os.set_inheritable(descriptor, False)
        compute_time.measure(self.connection.words)
        if Env.DETECT_HANGS in os.environ:
            self.enable_stack_dumps()

    def begin_round(self, kept_callbacks: int) -> None:
        """Connect at the next report, for the round in the environment then; keep the first so many callbacks."""
        del self.callbacks[kept_callbacks:]
        atexit.unregister(_end_at_once)  # of a planned end: this process goes on, and may fail later
        self._disconnect(ChannelState.UNOPENED)

    def enable_stack_dumps(self) -> None:
        """Dump the stacks of all threads on the agent's signal, also if Python hangs in a call into C."""
        path = os.environ.get(Env.STACK_DUMP_FILE)
        if path and not self._dumps_stacks:
            self._dumps_stacks = True
            import faulthandler

            with suppress(OSError, ValueError):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                faulthandler.register(STACK_DUMP_SIGNAL, file=file, all_threads=True)
                atexit.register(self._mark_ending)

    def reset_after_fork(self) -> None:
        """Close the connection in a child process: it is not the rank."""
        if self.connection is None:
            return
        self._disconnect(ChannelState.NO_AGENT)
        for descriptor in self.memory:
            with suppress(OSError):
                os.close(descriptor)
        self.memory = ()

    def _disconnect(self, state: ChannelState) -> None:
        self.state, connection, self.connection = state, self.connection, None
        if connection is not None:
            connection.socket.close()

    def _mark_ending(self) -> None:
        if self.connection is not None:
            self.connection.words[PageWord.ENDING] = 1


channel = ProgressChannel()


class Stopped(SystemExit):
    """Raised by `progress` at the last step of a round that ends on plan; the process should exit with it.

    It is a SystemExit with code 0, so `except Exception` does not catch it. Do not start another step after it. In a
    restartable function, let it leave the function: the function is called again in the next round.

    Example:
        >>> try:
        ...     elasticjob.progress(1)
        ... except elasticjob.Stopped:
        ...     print("the round ends: close the log files")
        ...     raise
    """


def progress(step: int, total: SupportsIndex | None = None, metrics: Mapping[str, SupportsFloat] | None = None) -> None:
    """Report that `step` is done: an integer, 0 or more, that grows by the same amounts on every rank.

    Call it once a step on every rank, from the main thread, after the optimizer's step and after the assignment of
    `State.step`. Without an elasticjob agent it does nothing.

    Args:
        step: Number of steps done.
        total: Number of steps of the whole training; None: unknown.
        metrics: Numbers or tensors of one element, by name. Rank 0 reports them and `total` to `status.trainerStatus`;
            it reads them once a second, and at the last step.

    Raises:
        Stopped: The round ends on plan (a pod joins, leaves or is drained), and this was its last step, the same on all
            ranks. The callbacks of `on_stop` have run.
        TypeError: `total` is not a whole number, or a metric is not a number.
        ValueError: There are too many metrics.

    Example:
        >>> for step in range(1, 4):
        ...     elasticjob.progress(step, total=3, metrics={"loss": 1 / step})
    """
    connection = channel.connection or channel.open()
    if connection is None:
        return
    words = connection.words
    words[_STEP] = step
    words[_TIME] = now = monotonic_ns()
    if (total is not None or metrics is not None) and (now >= connection.publish_at or step == total):
        connection.publish_metrics(step, now, total, metrics or {})
    if step >= words[_LIMIT]:
        _stop_or_continue(connection, step)


def report_begin(step: int) -> None:
    """Report the step at which the round begins, as `progress` does: the agent knows that it is not of this round."""
    if (connection := channel.open()) is not None:
        words = connection.words
        words[PageWord.BEGIN_STEP], words[PageWord.BEGIN_TIME] = step, monotonic_ns()
    progress(step)


def report_end(step: int, total: int | None, metrics: Mapping[str, SupportsFloat]) -> None:
    """Report the last step of a training, as `progress` does, without a stop: the script goes on after its training."""
    if (connection := channel.open()) is not None:
        connection.words[_STEP] = step
        connection.words[_TIME] = now = monotonic_ns()
        connection.publish_metrics(step, now, total, metrics)


def report_received(size: int, seconds: float, interface: str) -> None:
    """Report that this rank has received a state of `size` bytes from another one; `interface`: empty if unknown."""
    agent_connection.send_received(size, seconds, interface)


def heartbeat() -> None:
    """Report a step that an optimizer or a State has counted, for scripts that do not call `progress`."""
    if (connection := channel.connection or channel.open()) is not None:
        connection.words[_HEARTBEATS] += 1
        connection.words[_HEARTBEAT_TIME] = monotonic_ns()


def deadline() -> float | None:
    """Return the seconds until this process must have ended; None while nothing ends it.

    A process must end because its pod does (a deletion, an eviction, a drain, a shutdown of the Node), because the end
    of its Node is announced with a time, because the round ends on plan, or because another rank has failed. The value
    differs between ranks and may fall at any time. In a process that survives the round it is None again in the next
    one, if its Node stays.

    Returns:
        Seconds, 0.0 if the time is over. None without an elasticjob agent.

    Example:
        >>> left = elasticjob.deadline()
        >>> if left is not None and left > 20:
        ...     print("there is time for a checkpoint that takes 10 s")
    """
    connection = channel.open()
    if connection is None or not 0 < (at := connection.words[PageWord.DEADLINE]) < NO_LIMIT:
        return None  # 0: an older agent sets none
    return max(0.0, (at - monotonic_ns()) / 1e9)


def on_stop(save: Callable[[], object]) -> None:
    """Call `save` on every rank after the last step of a round that ends on plan, in the order of registration.

    `progress` calls it, in the main thread, before it raises `Stopped`. A `State` and a `ShardedState` commit there on
    their own. Register it before the first step; in a restartable function, what was registered inside the function is
    dropped when the round ends.

    Args:
        save: Called without arguments. What it raises leaves `progress` in place of `Stopped`.

    Example:
        >>> elasticjob.on_stop(lambda: print("all ranks save after the same step"))
    """
    channel.callbacks.append(save)


def on_stop_once(save: Callable[[], object]) -> None:
    """Register `save` as `on_stop` does, unless it is registered: a new round of the process may have dropped it."""
    if save not in channel.callbacks:
        on_stop(save)


def at_process_end(copy_state: Callable[[], object]) -> None:
    """Let `copy_state` run when a process that has outlived its last round ends; it replaces an earlier one."""
    channel.copy_state = copy_state


def copy_state() -> None:
    """Run what `at_process_end` was called with: the memory that the agent keeps outlives this process."""
    if channel.copy_state is not None:
        channel.copy_state()


def node_memory() -> tuple[int, ...]:
    """Return the descriptors of the memory that the agent keeps for its pod across rounds; () without an agent."""
    channel.open()
    return channel.memory


def callback_count() -> int:
    """Return how many callbacks `on_stop` has registered."""
    return len(channel.callbacks)


def begin_round(kept_callbacks: int) -> None:
    """Connect again for the round in the environment, at the next report; keep the first so many callbacks.

    The memory that the agent keeps stays the same.
    """
    channel.begin_round(kept_callbacks)


def process_survives_round() -> bool:
    """Return whether this process outlives the round, so that its objects need not be copied at a planned end."""
    return channel.process_survives_round


def set_process_survives_round(survives: bool) -> None:
    """Set what `process_survives_round` returns. A restartable function does, whose process its agent keeps."""
    channel.process_survives_round = survives


def is_prestarted() -> bool:
    """Return whether the agent has started this process ahead of its first round, which has not begun yet."""
    return os.environ.get(Env.ROUND, "").startswith(f"{PRESTART_ROUND.attempt}.")


def enable_stack_dumps() -> None:
    """Dump the stacks of all threads on the agent's signal, also if Python hangs in a call into C."""
    channel.enable_stack_dumps()


def _stop_or_continue(connection: AgentConnection, step: int) -> None:
    """Wait until the agent has set the last step. Stop there; return if it is a later step."""
    words = connection.words
    while step >= (limit := words[_LIMIT]):
        if limit != HOLD:
            synchronize_device()  # the other ranks may wait for a collective that is queued here
            guard.check()  # no callback saves what a broken one has left
            for save in channel.callbacks:
                save()
            words[PageWord.STOPPED] = 1
            atexit.register(_end_at_once)
            raise Stopped(0)
        if not connection.wait_for_limit():
            return  # the agent has ended, and this process ends with it


def _end_at_once() -> None:
    """Run the remaining atexit functions and end the process, as a worker that fails does."""
    atexit.unregister(_end_at_once)
    end_at_once(0)


os.register_at_fork(after_in_child=lambda: channel.reset_after_fork())

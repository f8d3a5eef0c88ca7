"""`@elasticjob.restartable`: the agent has a training function called again in each round, in the same process."""

from __future__ import annotations

import functools
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch.distributed as dist

from elasticjob._runtime import diagnosis
from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.contract.restart_messages import (
    MAX_TEXT,
    AgentToWorker,
    BreakCollectives,
    CallAgain,
    Calling,
    End,
    Interrupt,
    Interrupted,
    Kept,
    Parked,
    Raised,
    ResultsEnded,
)
from elasticjob.inprocess._groups.nccl_environment import survive_nccl_errors
from elasticjob.inprocess._groups.process_groups import ProcessGroups, collect_garbage
from elasticjob.inprocess._restartable.agent_channel import AgentChannel
from elasticjob.inprocess._restartable.state_copier import StateCopier, seconds_before_copy
from elasticjob.inprocess._restartable.timeout_guard import TimeoutGuard
from elasticjob.inprocess._restartable.warm_up import warm_up
from elasticjob.inprocess._threads.interruption import Interrupter, RankShouldRestart
from elasticjob.inprocess._threads.own_thread import MonitorOfWorker
from elasticjob.training import progress_channel
from elasticjob.training.devices import is_asynchronous
from elasticjob.training.progress_channel import Stopped
from elasticjob.training.replicated import rank_random_states
from elasticjob.training.update_guard import guard

P = ParamSpec("P")
T = TypeVar("T")

PEER_TIMEOUT = 0.1
"""Seconds that a rank whose collective has failed waits for the end of the round. The agent of the peer at fault
reports it within milliseconds; tracebacks of all other ranks would take processor time from that, and hide the cause.
"""

has_been_called = False
"""Whether a restartable function has been called in this process. Only the first call can be made again, because a new
process begins with it: any other one is an ordinary call."""


@overload
def restartable(function: Callable[P, T]) -> Callable[P, T]: ...


@overload
def restartable(*, spare_process: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def restartable(function: Callable[P, T] | None = None, *, spare_process: bool = False) -> Any:
    """Let the processes of `function` survive the end of a round: it is called again with the next round's ranks.

    The function creates its process groups, builds what belongs to a round (DDP, data loaders), and trains. It is
    interrupted by `RankShouldRestart` when another rank fails, a pod is lost or the job scales; its process groups
    end, and it is called again with the same arguments once the next round has formed. Objects that it finds outside
    keep their state: model, optimizer, `elasticjob.State`. A process that hangs is replaced by a new one after
    `stopGraceSeconds`. The others wait for it, or go on with fewer ranks until it joins.

    Call the decorated function once, from the main thread. Any other call is an ordinary one. Without an elasticjob
    agent, the function is called once.

    Args:
        function: The training function. Its return value ends the job on this rank.
        spare_process: Keep another process of each rank that has run the script up to the function and waits there. It
            is started once the rank has made its first step, or has been in the function for as long as it took to get
            there. When the rank's process ends, it takes its place. This saves the time that the script needs up to the
            function, and costs the memory of what the script creates there.

    Returns:
        A function with the same arguments and result.

    Raises:
        Stopped: From the decorated function, if no further round comes for this process.

    Example:
        >>> @elasticjob.restartable
        ... def train():
        ...     return "trained"
        >>> train()
        'trained'
    """
    if function is None:
        return functools.partial(_restartable, spare_process=spare_process)
    return _restartable(function, spare_process=spare_process)


def _restartable(function: Callable[P, T], *, spare_process: bool) -> Callable[P, T]:

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        global has_been_called
        if has_been_called or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        channel = AgentChannel.open()
        if channel is None:
            if progress_channel.is_prestarted():
                raise Stopped(0)  # the agent has ended
            return function(*args, **kwargs)
        call, has_been_called = RestartableCall(channel, spare_process=spare_process), True
        try:
            result: T = call.run(functools.partial(function, *args, **kwargs))
            return result
        finally:
            call.close()

    return wrapped


@dataclass(frozen=True)
class _Ended:
    """How a call of the function ended, unless it returned."""

    at_last_step: bool = False
    error: Exception | None = None
    """Its exception, without its frames."""


class RestartableCall:
    """All calls of one function in this process."""

    def __init__(self, channel: AgentChannel, *, spare_process: bool = False) -> None:
        self._channel = channel
        self._spare_process = spare_process
        self._round = RoundId.parse(os.environ[Env.ROUND])
        self._interrupter = Interrupter()
        self._groups = ProcessGroups()
        self._copier = StateCopier(
            self._copy_state_for_agent,
            changes=lambda: guard.inside,
            aborts=lambda: self._groups.aborting,
            seconds=seconds_before_copy(os.environ),
        )
        self._timeout_guard = TimeoutGuard(channel.send, lambda: self._interrupter.pending)
        self._messages: queue.SimpleQueue[AgentToWorker | None] = queue.SimpleQueue()
        self._may_break = threading.Event()
        """Whether no rank of the round counts a step any more, or there is no agent that could say so."""
        self._closed = False
        self._connected = True
        """Whether the agent can have the function called again."""
        self._callbacks = progress_channel.callback_count()
        MonitorOfWorker(self._monitor, "elasticjob-monitor").start()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the function until it returns, and return its result.

        If no further round comes for this process, the exception of the last call is raised, or `Stopped`.
        """
        if self._round.is_prestarted:
            self._warm_up()
            self._await_round(_Ended())
        while True:
            ended = self._call(function)
            self._copier.wait()
            if not isinstance(ended, _Ended):
                return ended[0]
            rank_random_states.note_interruption()
            self._interrupter.end_results()
            if not ended.at_last_step:
                self._await_break()
            self._leave_groups(planned=ended.at_last_step)
            self._await_round(ended)
            del ended  # its exception may refer to what the last call made

    def _warm_up(self) -> None:
        if not dist.is_initialized():  # by the script, for something of its own
            survive_nccl_errors(os.environ)
            if warm_up():
                self._leave_groups()

    def _leave_groups(self, *, planned: bool = False) -> None:
        self._groups.leave(planned=planned)
        collect_garbage()  # data loaders end their processes with it

    def _await_round(self, ended: _Ended) -> None:
        """Wait for the next round, and enter it; raise what ended the last call if there is none."""
        self._channel.send(Parked(self._round, ended.at_last_step))
        message = self._messages.get()
        if not isinstance(message, CallAgain):
            self._copy_state_for_agent()
            self._channel.send(Kept())
            if isinstance(message, End) and message.at_once:
                os._exit(0)
            raise ended.error or Stopped(0)
        self._enter_round(message)

    def _copy_state_for_agent(self) -> None:
        """Let the agent save what this process has trained. An error must not hide why the process ends."""
        try:
            progress_channel.copy_state()
        except Exception:
            traceback.print_exc()

    def close(self) -> None:
        """Stop following the agent: from now on the agent ends this process like any other one."""
        progress_channel.set_process_survives_round(False)
        self._closed = True
        self._channel.close()
        self._interrupter.close()

    def _call(self, function: Callable[[], Any]) -> tuple[Any] | _Ended:
        """Call the function once; return its result in a tuple, or how else it ended."""
        guarded = survive_nccl_errors(os.environ)
        self._channel.send(Calling(self._round, self._spare_process))
        progress_channel.set_process_survives_round(self._connected)
        try:
            with (
                self._groups.watch(),
                self._timeout_guard.watch(self._round, active=guarded and self._connected),
                self._interrupter.armed(),
            ):
                return (function(),)
        except RankShouldRestart:
            return self._interrupted()
        except Stopped:
            self._channel.send(Interrupted(self._round))  # the groups may take longer than the grace of the round's end
            return _Ended(at_last_step=True)
        except Exception as error:
            if not self._connected:
                raise
            if self._interrupter.wait(PEER_TIMEOUT if _failed_because_of_peer(error) else 0.0):
                return self._interrupted()
            traceback.print_exc()
            sys.stderr.flush()
            self._channel.send(Raised(self._round, type(error).__name__, str(error)[:MAX_TEXT]))
            return _Ended(error=_without_frames(error))

    def _interrupted(self) -> _Ended:
        self._channel.send(Interrupted(self._round))
        return _Ended()

    def _await_break(self) -> None:
        """In the main thread: return once no rank of the round counts a step any more, where an abort needs that."""
        if is_asynchronous() and not self._may_break.is_set():  # no interruption has come while the function ran
            self._channel.send(ResultsEnded(self._round))
            self._may_break.wait()

    def _enter_round(self, message: CallAgain) -> None:
        os.environ.update(_environment(message.variables))
        self._round = message.round
        self._may_break.clear()
        progress_channel.begin_round(self._callbacks)

    def _monitor(self) -> None:
        """In its own thread: act on the agent's messages."""
        while message := self._channel.receive():  # None: the agent refuses this process, or it has ended
            self._act_on(message)
        self._connected = False
        progress_channel.set_process_survives_round(False)
        self._may_break.set()
        self._messages.put(None)

    def _act_on(self, message: AgentToWorker) -> None:
        match message:
            case Interrupt():
                self._copier.begin()
                self._interrupter.interrupt(self._groups.break_collectives, self._still_inside, self._await_peers)
            case BreakCollectives(round_id):
                if round_id == self._round:
                    self._may_break.set()
            case CallAgain() | End():
                self._interrupter.reset()  # before the main thread enters the next round
                self._messages.put(message)

    def _await_peers(self) -> bool:
        """In the monitor's thread: return once no rank of the round counts a step any more; False: the function has
        returned meanwhile, and there is nothing to break."""
        if not self._may_break.is_set():
            self._channel.send(ResultsEnded(self._round))
        while not self._may_break.is_set():
            if (message := self._channel.receive()) is None:
                return not self._closed
            self._act_on(message)
        self._copier.begin()  # the device could not be waited for until now
        return True

    def _still_inside(self) -> None:
        """In the monitor's thread: the main thread has not left its function, and the agent may kill this process."""
        self._end_if_lost()
        if self._copier.begin_if_due() and self._groups.break_formation():
            os.write(2, b"elasticjob: shut down the connections that were opened since the last group was created\n")

    def _end_if_lost(self) -> None:
        """In the monitor's thread: end this process if the main thread cannot leave its collective.

        The agent would end it after `stopGraceSeconds`, and all ranks would wait for that. No other process may have
        the state, so the pod's memory gets it first.
        """
        with suppress(OSError):  # too many open files
            if not self._groups.has_lost_operation():
                return
            pid = os.getpid()
            text = f"elasticjob: gloo has lost an operation of the round that ends: a new process replaces {pid}\n"
            os.write(2, text.encode())
            self._copy_state_for_agent()
            os.kill(pid, signal.SIGKILL)


def _failed_because_of_peer(error: Exception) -> bool:
    return diagnosis.classify(None, "", type(error).__name__, str(error)) is FailureClass.COLLECTIVE_FAILED


def _without_frames(error: Exception) -> Exception:
    """Return the exception after it and those that led to it have let go of the function's objects."""
    left: list[BaseException | None] = [error]
    seen = set()
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += [found.__cause__, found.__context__]
    return error


def _environment(variables: tuple[str, ...]) -> Mapping[str, str]:
    return dict(variable.split("=", 1) for variable in variables)

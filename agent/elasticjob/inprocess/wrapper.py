"""`Wrapper`: a decorator that has a distributed function called again, in the same processes, after a fault."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from elasticjob.inprocess._arguments.enforce import (
    enforce_instance_of_hook,
    enforce_subclass,
    enforce_type,
    enforce_value,
)
from elasticjob.inprocess._arguments.times import Times, check_log_file
from elasticjob.inprocess._call.call_wrapper import CallWrapper
from elasticjob.inprocess._call.wrapper_arguments import WrapperArguments
from elasticjob.inprocess._stores.store_mixin import StoreMixin
from elasticjob.inprocess.abort import Abort, AbortTorchDistributed
from elasticjob.inprocess.completion import Completion
from elasticjob.inprocess.finalize import Finalize
from elasticjob.inprocess.health_check import HealthCheck
from elasticjob.inprocess.initialize import Initialize
from elasticjob.inprocess.rank_assignment import RankAssignment, ShiftRanks
from elasticjob.inprocess.rank_filter import RankFilter
from elasticjob.inprocess.store import TCPStore
from elasticjob.inprocess.terminate import Terminate

P = ParamSpec("P")
T = TypeVar("T")


class Wrapper(WrapperArguments):
    """Calls a function again on all healthy ranks when it fails on one, in the same processes.

    It needs a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no agent. The wrapped function
    returns its own value on active ranks and None on spares. Call it on all ranks, in the main thread, before
    `init_process_group`; the function creates its process groups. docs/run/inprocess.md describes arguments and hooks.

    Example:
        >>> from elasticjob.inprocess import CallWrapper, RetryController, Wrapper
        >>> under_torchrun = dist.is_torchelastic_launched()
        >>> @Wrapper(initialize=RetryController(max_iterations=3), enabled=under_torchrun)
        ... def train(call: CallWrapper | None = None):
        ...     return "trained"
        >>> train()
        'trained'
    """

    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008  (it is new for each call of the function)
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = ShiftRanks(),  # noqa: B008
        rank_filter: RankFilter | None = None,
        monitor_thread_interval: timedelta = Times.monitor_thread_interval,
        monitor_process_interval: timedelta = Times.monitor_process_interval,
        heartbeat_interval: timedelta = Times.heartbeat_interval,
        heartbeat_timeout: timedelta = Times.heartbeat_timeout,
        progress_watchdog_interval: timedelta = Times.progress_watchdog_interval,
        soft_timeout: timedelta = Times.soft_timeout,
        hard_timeout: timedelta = Times.hard_timeout,
        barrier_timeout: timedelta = Times.barrier_timeout,
        completion_timeout: timedelta = Times.completion_timeout,
        last_call_wait: timedelta = Times.last_call_wait,
        termination_grace_time: timedelta = Times.termination_grace_time,
        monitor_process_logfile: str | None = None,
        enabled: bool = True,
    ) -> None:
        """Check the arguments; all are keywords.

        Args:
            store_factory: Class of the store that ranks and monitor processes share.
            store_kwargs: Its arguments.
            initialize: Called at the start of each iteration.
            abort: Called on an interruption, to break what the function waits for. None: nothing is broken.
            completion: Called once all ranks have completed.
            terminate: Called on a rank that leaves with an exception.
            finalize: Called after an interruption, to release what the function left behind.
            health_check: Called before each iteration; a rank whose check fails leaves.
            rank_assignment: Gives the remaining ranks their numbers.
            rank_filter: Decides which ranks call the function. The others are spares. None: all ranks do.
            monitor_thread_interval: How often the monitor thread looks for faults of its rank.
            monitor_process_interval: How often the monitor process does.
            heartbeat_interval: How often a monitor process reports that it lives.
            heartbeat_timeout: A rank whose heartbeats are missing for so long is lost.
            progress_watchdog_interval: How often the main thread's progress is recorded.
            soft_timeout: A rank without progress for so long is interrupted.
            hard_timeout: A rank without progress for so long is killed.
            barrier_timeout: How long ranks wait for each other between two iterations.
            completion_timeout: How long a rank that has completed waits for the others.
            last_call_wait: How long ranks wait for further ranks that end, once one has ended.
            termination_grace_time: Time between SIGTERM and SIGKILL.
            monitor_process_logfile: Absolute path of the monitor process's log; `{rank}` in it is replaced.
            enabled: False: the decorator returns the function itself.

        Raises:
            TypeError: An argument has another type. The message says what to write instead.
            ValueError: An argument is wrong, or this torch has no torch.distributed.
        """
        enforce_subclass("store_factory", store_factory, StoreMixin)
        enforce_type("store_kwargs", store_kwargs, dict, None)
        enforce_instance_of_hook("initialize", initialize, Initialize)
        enforce_instance_of_hook("abort", abort, Abort)
        enforce_instance_of_hook("completion", completion, Completion)
        enforce_instance_of_hook("terminate", terminate, Terminate)
        enforce_instance_of_hook("finalize", finalize, Finalize)
        enforce_instance_of_hook("health_check", health_check, HealthCheck)
        enforce_instance_of_hook("rank_assignment", rank_assignment, RankAssignment, optional=False)
        enforce_instance_of_hook("rank_filter", rank_filter, RankFilter)
        times = Times(
            monitor_thread_interval=monitor_thread_interval,
            monitor_process_interval=monitor_process_interval,
            heartbeat_interval=heartbeat_interval,
            heartbeat_timeout=heartbeat_timeout,
            progress_watchdog_interval=progress_watchdog_interval,
            soft_timeout=soft_timeout,
            hard_timeout=hard_timeout,
            barrier_timeout=barrier_timeout,
            completion_timeout=completion_timeout,
            last_call_wait=last_call_wait,
            termination_grace_time=termination_grace_time,
        )
        check_log_file(monitor_process_logfile)
        enforce_type("enabled", enabled, bool)
        enforce_value(dist.is_available(), "this torch has no torch.distributed: write enabled=False")
        super().__init__(
            store_factory=store_factory,
            store_kwargs=dict(store_kwargs or {}),
            initialize=initialize,
            abort=abort,
            completion=completion,
            terminate=terminate,
            finalize=finalize,
            health_check=health_check,
            rank_assignment=rank_assignment,
            rank_filter=rank_filter,
            times=times,
            monitor_process_logfile=monitor_process_logfile,
            enabled=enabled,
        )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Return the wrapped function; `function` itself if the wrapper is not enabled."""
        if not self.enabled:
            return function

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
            with CallWrapper(self) as call_wrapper:
                value: T | None = call_wrapper(function, args, kwargs)
                return value

        return wrapped

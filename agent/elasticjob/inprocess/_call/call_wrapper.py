"""`CallWrapper`: one call of a wrapped function, with all its restarts."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch.distributed as dist

from elasticjob.inprocess._call.call_store import CallStore
from elasticjob.inprocess._call.environment import Environment, host_name
from elasticjob.inprocess._call.frames import forget_frames
from elasticjob.inprocess._call.hook_calls import HookCalls
from elasticjob.inprocess._call.injection import substitute
from elasticjob.inprocess._call.iteration_end import IterationCompleted, IterationInterrupted
from elasticjob.inprocess._call.log_setup import LogSetup
from elasticjob.inprocess._call.monitor_start import start_monitor_process
from elasticjob.inprocess._call.wrapper_arguments import WrapperArguments
from elasticjob.inprocess._groups.nccl_environment import survive_nccl_errors
from elasticjob.inprocess._groups.process_groups import collect_garbage
from elasticjob.inprocess._stores.lost_rank import leaves_on_purpose, record_when_lost
from elasticjob.inprocess._stores.store_mixin import IterationOutcome, StoreMixin
from elasticjob.inprocess._threads.interruption import Interrupter, RankShouldRestart
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord
from elasticjob.inprocess.exception import InternalError, RestartError
from elasticjob.inprocess.monitor_process import MonitorProcess
from elasticjob.inprocess.monitor_thread import MonitorThread
from elasticjob.inprocess.progress_watchdog import ProgressWatchdog
from elasticjob.inprocess.state import State
from elasticjob.training.devices import is_asynchronous

log = logging.getLogger(__name__)

RESTART_TIMEOUT = 5.0
"""Seconds within which the monitor thread must see an interruption that this rank has recorded."""

_running = threading.Lock()
"""Held during a call: a wrapped function cannot call another one."""


class CallWrapper:
    """One call of a wrapped function on this rank.

    The function gets it as the value of each parameter that is annotated with `CallWrapper` or `CallWrapper | None`.

    Example:
        >>> def train(call: CallWrapper) -> None:
        ...     for step in range(100):
        ...         call.ping()  # from now on this rank must ping within the soft time-out
        ...         with call.atomic():
        ...             pass  # write a checkpoint: no restart interrupts it
    """

    def __init__(self, arguments: WrapperArguments) -> None:
        self._arguments = arguments
        self._times = arguments.times
        self._hooks = HookCalls(arguments)
        self._cleanup = ExitStack()
        try:
            self._set_up()
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> CallWrapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    # ---- for the function

    @property
    def iteration(self) -> int:
        """Number of restarts so far: 0 in the first call of the function."""
        return self._state.iteration

    @property
    def state(self) -> State:
        """The rank's place in this iteration, as hooks get it."""
        return self._state

    def ping(self) -> None:
        """Report progress.

        The first call in an iteration arms it: from then on this rank must call it again within the soft time-out.
        """
        self._watchdog.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Keep the abort and the restart out of this context, on the main thread. It may be nested.

        While an abort is in progress, this raises instead of entering. The hard time-out applies all the same.
        """
        with self._interrupter.atomic():
            yield

    # ---- set-up

    def _set_up(self) -> None:
        _check_process()
        if not _running.acquire(blocking=False):
            raise RuntimeError("a wrapped function cannot call another wrapped function: wrap the outer one only")
        self._cleanup.callback(_running.release)
        self._state = State.from_environment()
        self._cleanup.enter_context(LogSetup(self._state.rank))
        survive_nccl_errors(os.environ)
        self._interrupter = Interrupter()
        self._cleanup.callback(self._interrupter.close)
        self._environment = Environment()
        self._cleanup.callback(lambda: self._environment.restore(self._state))
        self._thread: MonitorThread | None = None
        self._place: State | None = None
        """This rank in the iteration from which no rank has been excluded yet. None: between two iterations."""
        self._start_monitor_process()
        self._cleanup.callback(lambda: self._monitor_process.shutdown())  # the one that runs then
        self._connect()
        self._watchdog = ProgressWatchdog(self._report_progress, self._times.progress_watchdog_interval)
        self._cleanup.callback(self._watchdog.shutdown)
        self._watchdog.start()

    def _connect(self) -> None:
        self._store = CallStore(self._arguments)
        self._cleanup.callback(self._forget_store)
        self._store.open()
        self._cleanup.callback(self._store.close)
        self._store.let_connect(self._monitor_process)  # before the barrier: it reports a rank that ends there
        store, state = self._store.for_call, self._state
        store.set_initial_rank(state.rank, state.initial_rank, host_name())
        store.initial_barrier(state.rank, state.world_size, self._times.barrier_timeout)
        self._state = replace(state, store=self._store.for_hooks)

    def _forget_store(self) -> None:
        """Release the store's connection now: cycles of objects would keep it until the next garbage collection."""
        self._state, self._place = replace(self._state, store=None), None
        self._store.forget()

    @property
    def _current_store(self) -> StoreMixin:
        """The store of this iteration, over the connection of the main thread."""
        return self._store.for_iteration(self.iteration)

    def _start_monitor_process(self) -> None:
        self._monitor_process = start_monitor_process(self._state, self._arguments)

    def _report_progress(self) -> None:
        self._monitor_process.report_progress()

    # ---- the call

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function until all ranks have completed it; return its value."""
        args, kwargs = substitute(function, args, kwargs, self, CallWrapper)
        call = functools.partial(function, *args, **kwargs)
        try:
            self._assign_ranks(set())
            while True:
                self._begin_iteration()
                ended = self._run_iteration(call)
                if isinstance(ended, IterationCompleted):
                    self._end_monitor_thread()  # before its connection is closed
                    self._hooks.complete(self._state)
                    return ended.value
                self._recover(ended.error)
        except BaseException as error:
            self._leave_early(error)
            raise
        finally:
            self._leave()

    def _begin_iteration(self) -> None:
        """Take this rank's place in an iteration, and wait until all ranks have taken theirs."""
        store = self._current_store
        state = self._state = self._place = replace(
            self._state, store=self._store.of_iteration_for_hooks(self.iteration)
        )
        if not self._monitor_process.is_running:
            self._monitor_process.shutdown()
            self._start_monitor_process()
            self._store.let_connect(self._monitor_process)
        # Before the rank is visible in the store: from here on the monitor process records the end of this rank.
        self._monitor_process.start_iteration(state.rank, state.world_size, state.iteration)
        if self._store.knows_lost_clients:
            record_when_lost(self._store.for_monitor_thread, state.initial_rank, state.rank, state.iteration)
        store.set_initial_rank(state.rank, state.initial_rank, host_name())
        self._environment.prepare(state, store)
        store.iteration_barrier(
            state.rank, state.world_size, self._times.barrier_timeout, on_missing=self._record_lost_before_iteration
        )
        self._environment.enter(store)
        self._watchdog.reset()

    def _record_lost_before_iteration(self, missing: set[int]) -> None:
        state, store = self._state, self._store.for_call
        if self._current_store.record_lost_before_iteration(missing, store, state.initial_world_size, state.world_size):
            log.warning("ranks %s ended before iteration %d", sorted(missing), state.iteration)

    def _run_iteration(self, call: Callable[[], Any]) -> IterationCompleted | IterationInterrupted:
        """Run the function once on this rank, and follow the iteration until its outcome."""
        errors: list[Exception] = []
        thread = self._thread = self._start_monitor_thread()
        try:
            with self._hooks.around_function(), self._interrupter.armed():
                return IterationCompleted(self._run_rank(call, errors))
        except RankShouldRestart as interruption:
            forget_frames(interruption)
        except Exception as error:
            raise InternalError(f"iteration {self.iteration} failed, and no restart came: {error}") from error
        if thread.failure is not None:
            raise InternalError(f"the wrapper's store is unavailable: {thread.failure}") from thread.failure
        return IterationInterrupted(errors[0] if errors else None)

    def _run_rank(self, call: Callable[[], Any], errors: list[Exception]) -> Any:
        """Run the hooks and the function of this rank. An interruption is raised in it, at any place."""
        store = self._current_store
        try:
            value = self._call_function(call, store)
            if self._complete(store) is IterationOutcome.COMPLETED:
                return value
        except Exception as error:
            self._watchdog.reset()
            if not self._interrupter.pending:  # else the abort was faster than the exception of the restart
                log.exception("rank %d: exception in iteration %d", self._state.rank, self.iteration)
                errors.append(error)
                store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
        except RankShouldRestart:
            if self._interrupter.pending:
                raise
            self._watchdog.reset()  # the function has raised it itself: it asks for a restart
            log.warning("rank %d: its function asks for a restart in iteration %d", self._state.rank, self.iteration)
            store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
        self._wait_for_restart()
        raise errors[0] if errors else InternalError("the iteration was interrupted")

    def _call_function(self, call: Callable[[], Any], store: StoreMixin) -> Any:
        self._state = self._hooks.initialize(self._state)
        self._hooks.check_health(self._state, None)
        if not self._state.is_active:
            return self._wait_as_spare(store)
        value = call()
        store.record_completed()
        return value

    def _wait_as_spare(self, store: StoreMixin) -> None:
        """Wait until an active rank has completed."""
        self._watchdog.ping()
        while not store.wait_for_completed_rank(self._times.progress_watchdog_interval):
            self._watchdog.ping()

    def _complete(self, store: StoreMixin) -> IterationOutcome:
        self._watchdog.reset()  # the function need not ping any more
        state, times = self._state, self._times
        return store.completion_barrier(
            state.rank, state.world_size, times.completion_timeout, timeout_chunk=times.completion_chunk
        )

    def _wait_for_restart(self) -> None:
        """Wait for the exception that the monitor thread raises here; return if none comes."""
        interrupted = threading.Event()
        while not interrupted.wait(RESTART_TIMEOUT):
            if not self._interrupter.pending:
                return

    # ---- recovery

    def _recover(self, error: Exception | None) -> None:
        """Prepare the next iteration, in which this rank has a new place."""
        self._end_monitor_thread()
        self._watchdog.reset()
        self._store.renew()
        self._state = replace(self._state, fn_exception=error)
        if error is not None:
            forget_frames(error)
        self._hooks.release(self._state, error)
        self._hooks.check_health(self._state, error)
        excluded = self._wait_for_termination()
        self._environment.close_store()
        self._state = self._state.advance()
        self._assign_ranks(excluded)
        collect_garbage()
        log.info(
            "iteration %d: rank %d of %d (initial rank %d)",
            self.iteration, self._state.rank, self._state.world_size, self._state.initial_rank,
        )  # fmt: skip

    def _wait_for_termination(self) -> set[int]:
        """Wait until all ranks have ended their functions; return those that are not in the next iteration."""
        state, store = self._state, self._current_store
        store.termination_barrier(state.rank, state.world_size, self._times.barrier_timeout)
        excluded: set[int] = store.exclude_terminated_ranks(self._times.last_call_wait)
        self._place = None
        if state.rank in excluded:
            raise RestartError(f"rank {state.rank} counts as lost: the other ranks continue without it")
        return excluded

    def _assign_ranks(self, terminated: set[int]) -> None:
        """Take this rank's number and role in the next iteration."""
        old = self._state
        if old.store is None:  # hosts of ranks are in the store of the iteration that ended
            old = replace(old, store=self._store.of_iteration_for_hooks(old.iteration - 1))
        state = self._hooks.assign_ranks(old, terminated)
        self._state = replace(state, store=None)

    def _abort(self) -> None:
        """In the monitor thread: break what the main thread may wait for."""
        self._hooks.abort(self._state)
        self._environment.close_store()

    # ---- monitor thread

    def _start_monitor_thread(self) -> MonitorThread:
        store = self._store.for_monitor_thread.for_iteration(self.iteration)
        thread = MonitorThread(
            rank=self._state.rank,
            world_size=self._state.world_size,
            barrier_timeout=self._times.barrier_timeout,
            store=store,
            interrupter=self._interrupter,
            interval=self._times.monitor_thread_interval,
            find_fault=self._find_fault,
            abort=self._abort,
        )
        thread.start()
        return thread

    def _find_fault(self) -> Interruption | None:
        if not self._monitor_process.is_running:
            return Interruption.MONITOR_PROCESS
        if self._watchdog.age() > self._times.soft_timeout.total_seconds():
            return Interruption.SOFT_TIMEOUT
        return None

    def _end_monitor_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._interrupter.reset()

    # ---- end

    def _leave_early(self, error: BaseException) -> None:
        """Report that this rank leaves, so that the others go on without it."""
        rank = self._state.rank
        log.error("rank %d leaves: %s: %s", rank, type(error).__name__, error)
        try:
            self._store.renew()
            if self._place is not None:
                called, size = self._thread is not None, self._place.world_size
                outcome = self._current_store.record_end(rank, size, Interruption.BASE_EXCEPTION)
                self._end_monitor_thread()
                if called and outcome is IterationOutcome.INTERRUPTED and is_asynchronous():
                    self._interrupter.end_results()
                    self._current_store.results_barrier(rank, size, self._times.barrier_timeout)
        except (OSError, RuntimeError) as unavailable:
            log.error("rank %d could not report that it leaves: %s", rank, unavailable)
        self._hooks.leave(self._state)

    def _leave(self) -> None:
        """Record that this rank has left. One that hosts something for the others waits for them."""
        try:
            store, state = self._store.for_call, self._state
            store.record_base_terminated_rank(state.initial_rank)
            if self._store.knows_lost_clients:
                leaves_on_purpose(store, state.initial_rank)
            if state.initial_rank in self._store.critical_ranks:
                store.wait_for_base_terminated_ranks(state.initial_world_size)
        except (OSError, RuntimeError) as error:
            log.error("rank %d could not report that it has left: %s", self._state.rank, error)
        self._thread = None


def monitor_process(call: CallWrapper) -> MonitorProcess:
    """Return the monitor process of this rank: no attribute of its call, which scripts get, has it."""
    return call._monitor_process


def _check_process() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("call the wrapped function in the main thread: restarts are raised there")
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed is initialized already: call init_process_group in the wrapped function, "
            "or destroy_process_group before its call"
        )

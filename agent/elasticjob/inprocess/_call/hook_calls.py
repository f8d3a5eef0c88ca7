"""Calls of the hooks of a `Wrapper`, and what becomes of the exceptions that they raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from elasticjob.inprocess._call.wrapper_arguments import WrapperArguments
from elasticjob.inprocess.exception import HealthCheckError, RestartError
from elasticjob.inprocess.state import State, Status

log = logging.getLogger(__name__)


class HookCalls:
    """Calls the hooks that the wrapper has; those that it does not have do nothing."""

    def __init__(self, arguments: WrapperArguments) -> None:
        self._hooks = arguments

    def assign_ranks(self, old: State, terminated: set[int]) -> State:
        """Return this rank's number and role in the next iteration. RestartError: it has none, or ranks are left."""
        asked = replace(old, status=Status.INITIALIZED, active_rank=None, active_world_size=None)
        state, left = self._hooks.rank_assignment(asked, set(terminated))
        if left:
            raise RestartError(
                f"the rank assignment {self._hooks.rank_assignment!r} left terminated ranks {sorted(left)} "
                f"in iteration {old.iteration}: it must remove them"
            )
        if state.status is Status.TERMINATED:
            raise RestartError(f"the rank assignment has no place for rank {old.rank} in iteration {old.iteration}")
        if state.status is Status.INITIALIZED:
            state = state.activate_all_ranks()
        return self._hooks.rank_filter(state) if self._hooks.rank_filter is not None else state

    def initialize(self, state: State) -> State:
        """Return the state that the hook returns, or the same one."""
        if self._hooks.initialize is None:
            return state
        return self._hooks.initialize(state) or state

    def check_health(self, state: State, error: Exception | None) -> None:
        """HealthCheckError: this rank may not take part. `error`: what its function raised."""
        if self._hooks.health_check is None:
            return
        try:
            self._hooks.health_check(state, error)
        except Exception as failed:
            raise HealthCheckError(f"the health check of rank {state.rank} failed: {failed}") from failed

    @contextmanager
    def around_function(self) -> Iterator[None]:
        """A context around the function, in which `abort` can break what it waits for."""
        if self._hooks.abort is None:
            yield
        else:
            with self._hooks.abort.around_function():
                yield

    def abort(self, state: State) -> None:
        """In the monitor thread: break what the main thread may wait for. An exception is logged."""
        try:
            if self._hooks.abort is not None:
                self._hooks.abort(state)
        except Exception:
            log.exception("rank %d: its abort failed", state.rank)

    def release(self, state: State, error: Exception | None) -> None:
        """Release what the function left behind. An exception is logged and raised: it ends the rank."""
        try:
            if self._hooks.abort is not None:
                self._hooks.abort.after_function()
            if self._hooks.finalize is not None:
                self._hooks.finalize(state, error)
        except Exception:
            log.exception("rank %d: its finalize failed", state.rank)
            raise

    def complete(self, state: State) -> None:
        """All ranks have completed. An exception is logged: no rank would take part in a restart any more."""
        if self._hooks.completion is None:
            return
        try:
            self._hooks.completion(state)
        except Exception:
            log.exception("rank %d: its completion failed", state.rank)

    def leave(self, state: State) -> None:
        """This rank leaves early. Exceptions are logged, so that they do not hide why it leaves."""
        try:
            if self._hooks.abort is not None:
                self._hooks.abort(state)
                self._hooks.abort.after_function()
        except Exception:
            log.exception("rank %d: its abort failed", state.rank)
        try:
            if self._hooks.terminate is not None:
                self._hooks.terminate(state)
        except Exception:
            log.exception("rank %d: its terminate failed", state.rank)

"""One hook of several."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from elasticjob.inprocess.abort import Abort
from elasticjob.inprocess.completion import Completion
from elasticjob.inprocess.finalize import Finalize
from elasticjob.inprocess.health_check import HealthCheck
from elasticjob.inprocess.initialize import Initialize
from elasticjob.inprocess.rank_assignment import RankAssignment
from elasticjob.inprocess.rank_filter import RankFilter
from elasticjob.inprocess.state import State
from elasticjob.inprocess.terminate import Terminate

log = logging.getLogger(__name__)


def compose(*hooks: Any) -> Any:
    """Return a hook that calls the given ones in order; each gets the state that the one before has returned.

    All must be of one kind. A rank assignment may be followed by further ones, and by rank filters. One that needs the
    hosts of ranks must be the first.
    """
    if not hooks:
        raise ValueError("compose needs at least one hook")
    if isinstance(hooks[0], RankAssignment):
        late = [hook for hook in hooks[1:] if getattr(hook, "needs_hosts", False)]
        if late:
            raise ValueError(f"compose: {late[0]!r} needs the hosts of all ranks: write it first")
        return _Assignments(_checked(hooks, RankAssignment, RankFilter))
    for base, composed in _COMPOSED.items():
        if isinstance(hooks[0], base):
            return composed(_checked(hooks, base))
    kinds = ", ".join(base.__name__ for base in (RankAssignment, *_COMPOSED))
    raise TypeError(f"compose needs hooks derived from one of {kinds}; {hooks[0]!r} is not")


def Compose(*hooks: Any) -> Any:  # noqa: N802  (the name in NVIDIA's wrapper)
    """Return `compose` of the hooks in reverse: as in NVIDIA's wrapper, `Compose(a, b, c)(x)` is `a(b(c(x)))`."""
    return compose(*reversed(hooks))


def _checked(hooks: Sequence[Any], *bases: type) -> Sequence[Any]:
    for hook in hooks:
        if not isinstance(hook, bases):
            names = " or ".join(base.__name__ for base in bases)
            raise TypeError(f"compose: {hook!r} must be an instance of {names}, as {hooks[0]!r} is")
    return hooks


class _Several:
    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks

    def _call_each(self, *args: Any) -> None:
        for hook in self._hooks:
            hook(*args)


class _Assignments(_Several, RankAssignment):
    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        for hook in self._hooks:
            if isinstance(hook, RankFilter):
                state = hook(state)
            else:
                state, terminated_ranks = hook(state, terminated_ranks)
        return state, terminated_ranks


class _Filters(_Several, RankFilter):
    def __call__(self, state: State) -> State:
        for hook in self._hooks:
            state = hook(state)
        return state


class _Initializes(_Several, Initialize):
    def __call__(self, state: State) -> State:
        for hook in self._hooks:
            state = hook(state) or state
        return state


class _Finalizes(_Several, Finalize):
    def __call__(self, state: State, exception: Exception | None) -> None:
        self._call_each(state, exception)


class _HealthChecks(_Several, HealthCheck):
    def __call__(self, state: State, exception: Exception | None) -> None:
        self._call_each(state, exception)


class _Aborts(_Several, Abort):
    def __call__(self, state: State) -> None:
        for hook in self._hooks:
            try:
                hook(state)
            except Exception:  # the main thread may wait for what the next one breaks
                log.exception("abort %r failed", hook)

    @contextmanager
    def around_function(self) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook.around_function())
            yield

    def after_function(self) -> None:
        for hook in self._hooks:
            hook.after_function()


class _Completions(_Several, Completion):
    def __call__(self, state: State) -> None:
        self._call_each(state)


class _Terminates(_Several, Terminate):
    def __call__(self, state: State) -> None:
        self._call_each(state)


_COMPOSED: dict[type, Any] = {
    RankFilter: _Filters,
    Initialize: _Initializes,
    Abort: _Aborts,
    Finalize: _Finalizes,
    HealthCheck: _HealthChecks,
    Completion: _Completions,
    Terminate: _Terminates,
}

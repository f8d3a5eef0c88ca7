"""The State that planned ends and the end of the process keep: the memory that an agent keeps has room for one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from elasticjob.training import progress_channel

if TYPE_CHECKING:
    from elasticjob.training.replicated.state import State


class CurrentState:
    """The State that was created last, or called `sync` last, in this process."""

    def __init__(self) -> None:
        self._state: weakref.ref[State] | None = None

    def get(self) -> State | None:
        """Return it; None if there is none, or if the script has dropped it."""
        return self._state() if self._state is not None else None

    def replace(self, state: State) -> None:
        """Let planned ends commit this State, and no longer an earlier one of this process."""
        earlier = self.get()
        if earlier is not None and earlier is not state:
            earlier._give_way()
        self._state = weakref.ref(state)
        state._live.watch()
        progress_channel.at_process_end(_keep_current)
        progress_channel.on_stop_once(_commit_current)


current = CurrentState()


def _commit_current() -> None:
    if (state := current.get()) is not None:
        state._end_round()


def _keep_current() -> None:
    if (state := current.get()) is not None:
        state._keep_live()

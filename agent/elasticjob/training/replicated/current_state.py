"""The State that planned ends and the end of the process keep: the memory that an agent keeps has room for one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticjob._runtime.contract.snapshot_format.commit_sequence import CommitSequence
from elasticjob.training import progress_channel
from elasticjob.training.replicated.copies.background_copy import BackgroundCopy
from elasticjob.training.replicated.copies.copy_writer import CopyWriter
from elasticjob.training.replicated.live.live_state import LiveState
from elasticjob.training.snapshot_values.node_copies import NodeCopies

if TYPE_CHECKING:
    from elasticjob.training.replicated.state import State


@dataclass(frozen=True)
class StateInternals:
    """What a State consists of. State has no public names for it, because each of them could be a plain value's."""

    live: LiveState
    copies: NodeCopies
    writer: CopyWriter
    background: BackgroundCopy
    sequence: CommitSequence
    copy_live: Callable[[], None]
    """Called when the process ends."""
    end_round: Callable[[], None]
    """Keeps the state at the last step of a planned end."""


class CurrentState:
    """The State that was created last, or called `sync` last, in this process."""

    def __init__(self, internals: Callable[[State], StateInternals]) -> None:
        self._internals = internals
        self._state: weakref.ref[State] | None = None

    def get(self) -> State | None:
        """Return it; None if there is none, or if the script has dropped it."""
        return self._state() if self._state is not None else None

    def replace(self, state: State) -> None:
        """Let planned ends commit this State, and no longer an earlier one of this process."""
        earlier = self.get()
        if earlier is not None and earlier is not state:
            replaced = self._internals(earlier)
            replaced.background.wait_ignoring_errors()
            replaced.live.stop_watching()
        self._state = weakref.ref(state)
        self._internals(state).live.watch()
        progress_channel.at_process_end(self._copy_live)
        progress_channel.on_stop_once(self._end_round)

    def _copy_live(self) -> None:
        if (state := self.get()) is not None:
            self._internals(state).copy_live()

    def _end_round(self) -> None:
        if (state := self.get()) is not None:
            self._internals(state).end_round()

"""Watch the time-outs of process groups on which torch does not act in a restartable function.

torch's watchdog ends the process when an nccl collective is overdue or fails. In a process that is to stay it must
not (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`), so a rank that does not enter a collective would keep all others waiting
for ever. The watchdog still finds such a collective, by the time-out of its group, and says so (`get_error`). A thread
asks for that and lets the agent end the round.

Measuring time in torch's place was the other way. It would need its own table of collectives; a limit on the time
between two steps would also end a long evaluation without any collective, which torch lets pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import distributed_c10d

from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.restart_messages import MAX_TEXT, CollectiveFailed, Guarded, WorkerToAgent
from elasticjob.training import progress_channel

GUARDED = ("nccl",)
"""How the names of the backends begin that read `TORCH_NCCL_ASYNC_ERROR_HANDLING`: torch has several for nccl. gloo
raises in the main thread when a collective is overdue."""
INTERVAL = 1.0
"""Seconds between two looks at the groups. torch's own watchdog finds an overdue collective up to 1 s late."""
_TORCH_TIMEOUT = 600.0
"""Seconds: torch's default time-out of nccl groups (`default_pg_nccl_timeout`)."""


@dataclass(frozen=True)
class GroupState:
    """A process group on one backend."""

    name: str
    seconds: float
    """Its time-out."""
    error: str | None
    """`SUCCESS`, `TIMEOUT`, `COMM_ERROR` or `REMOTE_ERROR`; None if this version of torch does not tell."""


class TimeoutGuard:
    """Reports groups that are overdue or have failed to the agent."""

    def __init__(self, send: Callable[[WorkerToAgent], None], interrupted: Callable[[], bool]) -> None:
        """`interrupted`: returns whether the round has ended, so that errors of its groups are expected."""
        self._send = send
        self._interrupted = interrupted

    @contextmanager
    def watch(self, round_id: RoundId, *, active: bool) -> Iterator[None]:
        """Watch the groups that exist in this context, if torch does not act on their time-outs (`active`)."""
        left = threading.Event()
        if active:
            progress_channel.enable_stack_dumps()
            watch = threading.Thread(target=self._watch, args=(round_id, left), daemon=True, name="elasticjob-guard")
            watch.start()
        try:
            yield
        finally:
            left.set()

    def _watch(self, round_id: RoundId, left: threading.Event) -> None:
        try:
            self._watch_groups(round_id, left)
        except Exception as error:
            sys.stderr.write(
                f"elasticjob: no step for {_TORCH_TIMEOUT:g} s ends this round if a collective hangs, because torch's "
                f"process groups cannot be watched ({error!r}): set a hangPolicy\n"
            )
            self._send(Guarded(round_id, _TORCH_TIMEOUT, by_collectives=False))

    def _watch_groups(self, round_id: RoundId, left: threading.Event) -> None:
        before: Sequence[GroupState] = ()
        announced: Guarded | None = None
        while not left.wait(INTERVAL):
            groups = guarded_groups()
            if groups and (guarded := describe(round_id, groups)) != announced:
                announced = guarded
                self._send(guarded)
            failed = find_failure(round_id, before, groups)
            if left.is_set() or self._interrupted():
                return
            if failed is not None:
                self._send(failed)
                return
            before = groups


def guarded_groups() -> list[GroupState]:
    """Return the groups of this process whose time-outs torch does not act on."""
    found: dict[int, GroupState] = {}
    for group in list(distributed_c10d._world.pg_map):
        backends = []
        with suppress(RuntimeError, ValueError):  # destroyed since
            backends = [group._get_backend(device) for device in group._device_types]
        for backend in backends:
            if backend.name().startswith(GUARDED):
                found[id(backend)] = _state(group.group_desc or group.group_name, backend)
    return list(found.values())


def _state(name: str, backend: Any) -> GroupState:
    error = backend.get_error().name if hasattr(backend, "get_error") else None
    return GroupState(name, backend.options._timeout.total_seconds(), error)


def describe(round_id: RoundId, groups: Sequence[GroupState]) -> Guarded:
    """Return what the agent has to know of these groups; there is at least one."""
    seconds = min(group.seconds for group in groups)
    return Guarded(round_id, seconds, by_collectives=all(group.error is not None for group in groups))


def find_failure(
    round_id: RoundId, before: Sequence[GroupState], groups: Sequence[GroupState]
) -> CollectiveFailed | None:
    """Return why the round has to end; None while it can go on.

    A communicator that has failed counts if it had failed at the look `before` too: when a peer is lost, the agent of
    that peer reports the cause within this time.
    """
    for group in groups:
        if group.error == "TIMEOUT":
            message = f"a collective of process group {group.name} has exceeded its time-out of {group.seconds:g} s"
            return CollectiveFailed(round_id, message[:MAX_TEXT], overdue=True)
    failed_before = {group.name for group in before if group.error in _FAILED}
    for group in groups:
        if group.error in _FAILED and group.name in failed_before:
            message = f"torch reports {group.error} for a communicator of process group {group.name}"
            return CollectiveFailed(round_id, message[:MAX_TEXT], overdue=False)
    return None


_FAILED = ("COMM_ERROR", "REMOTE_ERROR")

"""What ranks and their monitor processes share in a store: barriers, interruptions, and which ranks are left.

It needs no torch: monitor processes use it too. Keys have one writer each, or are only appended to, so that a writer
which ends between two operations leaves nothing half done:

    <call>/left                       initial ranks that have left the call, for good
    <call>/left_by/<number>           so many have left
    <call>/heartbeat/<initial rank>   counter of its monitor process
    <iteration>/member/<rank>         initial rank and host
    <iteration>/rank_of/<initial>     rank
    <iteration>/interruptions         records
    <iteration>/outcome               completed or interrupted: the first writer decides
    <iteration>/terminated            ranks that leave
    <iteration>/excluded              the terminated ranks, decided once all ranks have reached the termination barrier
    <iteration>/completed             a rank has completed
    <iteration>/<barrier>/arrived     ranks
    <iteration>/<barrier>/done        all have arrived
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any

from elasticjob.inprocess.attribution import Interruption, InterruptionRecord, decode_records
from elasticjob.inprocess.exception import RestartError

_CHUNK = timedelta(seconds=1)
"""How long one wait lasts. Between two of them, a rank checks whether others are missing for good."""


class IterationOutcome(Enum):
    """How an iteration ends, the same for all ranks."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"


BARRIERS_OF_LOST = ("iteration", "results", "termination")
"""Those at which other ranks of an iteration may wait for one that has ended."""


class BarrierTimeoutError(RestartError, TimeoutError):
    """Ranks did not reach a barrier in time."""


class StoreMixin:
    """Derive the store of a `store_factory` from this and from a `torch.distributed.Store`.

    It uses the operations `set`, `get`, `add`, `append`, `check`, `wait` and `compare_set` of that class.
    """

    add: Any
    append: Any
    check: Any
    compare_set: Any
    get: Any
    set: Any
    wait: Any

    critical_ranks: frozenset[int] = frozenset({0})
    """Initial ranks that host something the others need: they leave last."""

    def with_prefix(self, prefix: str) -> StoreMixin:
        """Return the same store, over the same connection, with a prefix to its keys."""
        raise NotImplementedError(f"{type(self).__name__} must define with_prefix(prefix)")

    def for_iteration(self, iteration: int) -> StoreMixin:
        """Return the store of an iteration, from that of its call."""
        return self.with_prefix(f"iteration/{iteration}")

    def connect(self) -> StoreMixin | None:
        """Return another connection, for another thread; None: the wrapper calls the factory a second time."""
        return None

    knows_lost_clients = False
    """Whether the server is one of ours, which executes requests for ranks whose connections have closed."""

    def endpoint(self) -> tuple[str, int] | None:
        """Return host and port of a TCPStore server; None: a monitor process calls the factory instead."""
        return None

    # ---- barriers

    def initial_barrier(self, rank: int, rendezvous_count: int, timeout: timedelta) -> None:
        """Wait until all ranks have called the function."""
        self._barrier("initial", rank, rendezvous_count, timeout)

    def iteration_barrier(
        self,
        rank: int,
        rendezvous_count: int,
        timeout: timedelta,
        on_missing: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        """Wait until all ranks begin the iteration. `on_missing` is called about once a second with missing ranks."""
        self._barrier("iteration", rank, rendezvous_count, timeout, on_missing)

    def termination_barrier(self, rank: int, rendezvous_count: int, timeout: timedelta) -> None:
        """Wait until all ranks of the iteration have ended the function, or have left."""
        self._barrier("termination", rank, rendezvous_count, timeout)

    def results_barrier(self, rank: int, rendezvous_count: int, timeout: timedelta) -> None:
        """Wait until all ranks of the iteration count no step any more, or have left."""
        self._barrier("results", rank, rendezvous_count, timeout)

    def end_results(self, rank: int) -> None:
        """Record that a rank counts no step any more. Ranks that wait for it see that within a second."""
        self.append("results/arrived", f"{rank},")

    def completion_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta, timeout_chunk: timedelta = _CHUNK
    ) -> IterationOutcome:
        """Wait until all ranks have completed, in waits of at most `timeout_chunk`, or the iteration is interrupted."""
        if len(self.arrive("completion", rank)) == rendezvous_count:
            return self.decide(IterationOutcome.COMPLETED)
        deadline = time.monotonic() + timeout.total_seconds()
        while (outcome := self.wait_for_outcome(_until(deadline, timeout_chunk))) is None:
            arrived = self._numbers("completion/arrived")
            if len(arrived) == rendezvous_count:
                return self.decide(IterationOutcome.COMPLETED)
            _check_deadline("completion", deadline, timeout, rendezvous_count, arrived)
        return outcome

    def arrive(self, barrier: str, rank: int) -> set[int]:
        """Record that a rank has reached a barrier, once or more often; return the ranks that have."""
        self.append(f"{barrier}/arrived", f"{rank},")
        return self._numbers(f"{barrier}/arrived")

    def arrive_for(self, rank: int, rendezvous_count: int) -> None:
        """Record for a rank that has ended that it has reached the barriers at which the others may wait."""
        for barrier in BARRIERS_OF_LOST:
            if len(self.arrive(barrier, rank)) == rendezvous_count:
                self.set(f"{barrier}/done", "1")

    def record_lost_before_iteration(
        self, missing: set[int], call: StoreMixin, initial_world_size: int, world_size: int
    ) -> bool:
        """Record the end of ranks that ended before they began this iteration; return whether they did.

        Their monitor processes do not know their new ranks. But if as many initial ranks have left as are missing here,
        and the iteration does not know of them, these are the missing ones.
        """
        left = call.get_base_terminated_count()  # first: ranks that end meanwhile are subtracted then, not added
        known = initial_world_size - world_size + len(self.get_terminated_ranks())
        if left - known < len(missing):
            return False
        for rank in missing:
            self.record_end(rank, world_size, Interruption.TERMINATED)
        return True

    def _barrier(
        self,
        name: str,
        rank: int,
        count: int,
        timeout: timedelta,
        on_missing: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        arrived = self.arrive(name, rank)
        while len(arrived) < count:
            if self.wait_for([f"{name}/done"], _until(deadline, _CHUNK)):
                return
            arrived = self._numbers(f"{name}/arrived")
            if missing := set(range(count)) - arrived:
                on_missing(missing)
                _check_deadline(name, deadline, timeout, count, arrived)
        self.set(f"{name}/done", "1")

    # ---- ranks

    def set_initial_rank(self, rank: int, initial_rank: int, host: str = "") -> None:
        """Record the initial rank of a rank, and its host, before it reaches the iteration barrier."""
        self.set(f"member/{rank}", json.dumps([initial_rank, host]))
        self.set(f"rank_of/{initial_rank}", str(rank))

    def get_initial_rank(self, rank: int) -> int:
        return self.get_members([rank])[0][0]

    def get_members(self, ranks: Iterable[int]) -> list[tuple[int, str]]:
        """Return (initial rank, host) of each rank. They must have reached the iteration barrier."""
        members = (json.loads(self.get(f"member/{rank}")) for rank in ranks)
        return [(int(initial_rank), str(host)) for initial_rank, host in members]

    def find_rank(self, initial_rank: int) -> int | None:
        """Return the rank of an initial rank; None: it has not begun the iteration."""
        text = self._text(f"rank_of/{initial_rank}")
        return int(text) if text else None

    def record_terminated_rank(self, rank: int) -> None:
        """Record that a rank leaves."""
        self.append("terminated", f"{rank},")

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that have left so far."""
        return self._numbers("terminated")

    def exclude_terminated_ranks(self, last_call_wait: timedelta = timedelta(0)) -> set[int]:
        """Return the terminated ranks without which the next iteration begins: the same set for all callers.

        Call it after the termination barrier. If a rank has terminated, this waits for further ones that end together
        with it. A rank that ends later counts as lost in the next iteration.
        """
        if last_call_wait and self.get_terminated_ranks():
            self.wait_for(["excluded"], last_call_wait)
        text = ",".join(map(str, sorted(self.get_terminated_ranks()))) + ","
        return _numbers(_decoded(self.compare_set("excluded", "", text)))

    def record_end(self, rank: int, rendezvous_count: int, kind: Interruption) -> IterationOutcome:
        """Record that a rank has ended, or is about to leave, so that no other rank waits for it.

        Return the outcome of the iteration, as `record_interrupted` does.
        """
        outcome = self.record_interrupted(InterruptionRecord(rank, kind))
        self.record_terminated_rank(rank)
        self.arrive_for(rank, rendezvous_count)
        return outcome

    def record_base_terminated_rank(self, initial_rank: int) -> None:
        """Record, in the store of the call, that an initial rank has left the call.

        What the iteration's store has to know of it is recorded before: see `record_lost_before_iteration`.
        """
        self.append("left", f"{initial_rank},")
        self.set(f"left_by/{self.get_base_terminated_count()}", "1")

    def wait_for_base_terminated_ranks(self, count: int) -> None:
        """Wait until `count` initial ranks have left the call."""
        while self.get_base_terminated_count() < count:
            self.wait_for([f"left_by/{count}"], _CHUNK)

    def get_base_terminated_ranks(self) -> set[int]:
        """Return the initial ranks that have left the call."""
        return self._numbers("left")

    def get_base_terminated_count(self) -> int:
        return len(self.get_base_terminated_ranks())

    # ---- end of an iteration

    def record_interrupted(self, record: InterruptionRecord) -> IterationOutcome:
        """Record an interruption. It has no effect, and COMPLETED is returned, once all ranks have completed."""
        self.append("interruptions", record.encode())
        return self.decide(IterationOutcome.INTERRUPTED)

    def get_interruption_records(self) -> tuple[InterruptionRecord, ...]:
        """Return the interruptions of this iteration, the first one first."""
        return decode_records(self._text("interruptions"))

    def record_completed(self) -> None:
        """Record that a rank has completed: spares need not wait longer."""
        self.set("completed", "1")

    def is_any_rank_completed(self) -> bool:
        return self.exists(["completed"])

    def wait_for_completed_rank(self, timeout: timedelta) -> bool:
        """Wait until a rank has completed; return whether one has."""
        return self.wait_for(["completed"], timeout)

    def decide(self, outcome: IterationOutcome) -> IterationOutcome:
        """Set the iteration's outcome unless it has one; return the one that it has."""
        return IterationOutcome(_decoded(self.compare_set("outcome", "", outcome.value)))

    def wait_for_outcome(self, timeout: timedelta) -> IterationOutcome | None:
        """Wait until the iteration has an outcome; None: it has none after `timeout`."""
        return IterationOutcome(_decoded(self.get("outcome"))) if self.wait_for(["outcome"], timeout) else None

    # ---- heartbeats, in the store of the call

    def send_heartbeat(self, initial_rank: int) -> None:
        self.add(f"heartbeat/{initial_rank}", 1)

    def count_heartbeats(self, initial_rank: int) -> int:
        return int(self.add(f"heartbeat/{initial_rank}", 0))

    # ---- operations

    def wait_for(self, keys: Sequence[str], timeout: timedelta) -> bool:
        """Wait until all keys exist; return whether they do."""
        try:
            self.wait(list(keys), timeout)
        except TimeoutError:
            return False
        except RuntimeError as error:
            if type(error).__name__ != "DistStoreError" and "timeout" not in str(error).lower():
                raise
            return self.exists(keys)
        return True

    def exists(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        if hasattr(self, "check"):
            return bool(self.check(list(keys)))
        try:  # older versions of torch
            self.wait(list(keys), timedelta(milliseconds=1))
        except RuntimeError:
            return False
        return True

    def _text(self, key: str) -> str:
        return _decoded(self.get(key)) if self.exists([key]) else ""

    def _numbers(self, key: str) -> set[int]:
        return _numbers(self._text(key))


def _numbers(text: str) -> set[int]:
    return {int(number) for number in text.split(",") if number}


def _decoded(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _until(deadline: float, longest: timedelta) -> timedelta:
    """Return how long one wait may last: `longest`, or less if the deadline comes earlier."""
    return min(longest, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def _check_deadline(name: str, deadline: float, timeout: timedelta, count: int, arrived: set[int]) -> None:
    if time.monotonic() < deadline:
        return
    missing = sorted(set(range(count)) - arrived)
    raise BarrierTimeoutError(
        f"ranks {', '.join(map(str, missing[:20]))} of {count} did not reach the {name} barrier "
        f"within {timeout.total_seconds():g} s: check whether they run, or increase the wrapper's time-out"
    )

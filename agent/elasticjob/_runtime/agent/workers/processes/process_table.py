"""The processes of this pod's workers, each with its state. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from elasticjob._runtime.agent.workers.processes.worker_process import (
    ENDED,
    FOR_NEXT_ROUND,
    IN_ROUND,
    INITIAL,
    ImpossibleEventError,
    ProcessEvent,
    ProcessState,
    next_state,
)
from elasticjob._runtime.agent.workers.worker import Worker


@dataclass(frozen=True)
class WorkerProcess:
    """One process."""

    pid: int
    state: ProcessState
    worker: Worker
    exiting_since: float = 0.0
    """Monotonic time at which it became EXITING."""
    reason_to_wait: str = ""
    """Why new workers wait until this process, which is exiting, has ended; empty: they do not wait."""


class ProcessTable:
    """All processes that have started and are not reaped, by process id."""

    def __init__(self) -> None:
        self._processes: dict[int, WorkerProcess] = {}

    def add(self, pid: int, worker: Worker, state: ProcessState) -> None:
        """Add a process that has started. ImpossibleEventError: it is there, or does not start in this state."""
        if pid in self._processes or state not in INITIAL:
            raise ImpossibleEventError(f"process {pid} starts in state {state.value}")
        self._put(WorkerProcess(pid, state, worker))

    def apply(self, pid: int, event: ProcessEvent, *, now: float = 0.0, reason_to_wait: str = "") -> WorkerProcess:
        """Let an event happen to a process; return the process as it was before. One that has ended leaves the table.

        `now`, `reason_to_wait`: of an event after which the process is exiting.
        """
        before = self._processes[pid]
        state = next_state(before.state, event)
        if state is ENDED:
            del self._processes[pid]
        elif state is not before.state:
            self._put(replace(before, state=state, exiting_since=now, reason_to_wait=reason_to_wait))
        return before

    def apply_to_all(self, pids: Iterable[int], event: ProcessEvent) -> None:
        for pid in tuple(pids):
            self.apply(pid, event)

    def set_worker(self, pid: int, worker: Worker) -> None:
        """Replace what is known of the worker of a process."""
        self._processes[pid] = replace(self._processes[pid], worker=worker)

    def set_reason_to_wait(self, pid: int, reason: str) -> None:
        """Set why new workers wait for a process that is exiting."""
        self._processes[pid] = replace(self._processes[pid], reason_to_wait=reason)

    def get(self, pid: int) -> WorkerProcess | None:
        return self._processes.get(pid)

    def state(self, pid: int) -> ProcessState | None:
        """Return the state of a process; None if there is no such process (any more)."""
        process = self._processes.get(pid)
        return process.state if process else None

    def processes(self) -> tuple[WorkerProcess, ...]:
        return tuple(self._processes.values())

    def workers(self, *states: Collection[ProcessState]) -> dict[int, Worker]:
        """Return the workers whose processes are in one of these states, by process id."""
        wanted = frozenset[ProcessState]().union(*states)
        return {pid: process.worker for pid, process in self._processes.items() if process.state in wanted}

    def pids(self, *states: Collection[ProcessState]) -> set[int]:
        return set(self.workers(*states))

    def _put(self, process: WorkerProcess) -> None:
        """Store a process. ImpossibleEventError: there would be two of its rank in the round, or for the next one."""
        for states in (IN_ROUND, FOR_NEXT_ROUND):
            others = self.workers(states) if process.state in states else {}
            if any(w.local_rank == process.worker.local_rank for pid, w in others.items() if pid != process.pid):
                text = f"a second process of local rank {process.worker.local_rank} would be {process.state.value}"
                raise ImpossibleEventError(text)
        self._processes[process.pid] = process

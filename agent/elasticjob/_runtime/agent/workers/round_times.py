"""When the workers of the round were started, called their functions and began to train."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace

from elasticjob._runtime.agent.monitoring.progress.start_times import StartTimes
from elasticjob._runtime.agent.monitoring.progress.worker_progress import WorkerProgress
from elasticjob._runtime.agent.start_workers.fork_fallback import fails_at_once
from elasticjob._runtime.agent.workers.spares.spare_decisions import RankInRound, may_start
from elasticjob._runtime.agent.workers.worker import Worker
from elasticjob._runtime.contract.messages import Failure, FailureClass


class RoundTimes:
    """Times of this pod's workers; monotonic seconds."""

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress
        self.start_times = StartTimes()
        self.started_at = 0.0
        """When the last workers were started."""
        self.longest_script = 0.0
        """Most seconds from the start of a process to its function so far."""
        self.longest_start: float | None = None
        """Most seconds from a start to `State.sync` so far; None if no worker has called it."""
        self._called: dict[int, float] = {}
        """When each worker called its function in this round, by local rank."""
        self._new: set[int] = set()
        """Process ids of the workers whose program was started for this round, and that have not called yet."""
        self._launched_at = 0.0
        """When the start of these began."""
        self._outcome_known = False
        """Whether `failed_at_once` has returned how that start went."""

    def begin_round(self) -> None:
        self._called = {}
        self.start_times.begin_round()

    def end_stage(self) -> None:
        """Forget the steps of the ranks of a launcher that ends."""
        self._progress.end_stage()

    def begin_start(self, local_ranks: Collection[int]) -> None:
        """Record that new processes of these ranks are about to start in the round."""
        self._launched_at = time.monotonic()
        self.start_times.begin_start(local_ranks)

    def new_processes(self, pids: Iterable[int]) -> None:
        """Record the process ids of these."""
        self._new = set(pids)

    def started(self, *, new: bool) -> None:
        """Record that all workers of the round have started. `new`: whether the launcher has started any of them."""
        self.started_at, self._outcome_known = time.monotonic(), not new

    def called(self, pid: int, local_rank: int) -> None:
        """Record that a worker calls its function in the round."""
        self._called[local_rank] = time.monotonic()
        if pid in self._new:
            self._new.discard(pid)
            self.longest_script = max(self.longest_script, time.monotonic() - self._launched_at)

    def failed_at_once(self, worker: Worker, failure: Failure | None) -> bool | None:
        """Return whether the round's new workers failed at once, by the first end that says so; else None."""
        if self._outcome_known:
            return None
        seconds = time.monotonic() - self.started_at
        failed = fails_at_once(failure, seconds, made_step=self._progress.made_step(worker.local_rank))
        self._outcome_known = failed is not None
        return failed

    def all_train(self, local_ranks: Iterable[int]) -> bool:
        """Return whether these workers train, so that spare processes may take processor time."""
        ranks = [RankInRound(self._progress.made_step(rank), self._called.get(rank)) for rank in local_ranks]
        return may_start(ranks, self.longest_script, time.monotonic())

    def trains(self, worker: Worker) -> bool:
        """Return whether a worker has made a step in this round, or may have: its script reports none, and it has been
        in its function for long."""
        if self._progress.made_step(worker.local_rank):
            return True
        return not self._progress.has_steps and self.all_train([worker.local_rank])

    def after_call(self, worker: Worker) -> Worker:
        """Return a worker whose function has ended, for the next round; record how long its round took to begin."""
        if (began := self._progress.began(worker.local_rank)) is not None:
            self.longest_start = max(self.longest_start or 0.0, began - self.started_at)
        trained = self.trains(worker)
        return replace(worker, failed_calls=0, trained=True, was_prestarted=False) if trained else worker

    def count_failed_call(self, worker: Worker, failure: Failure) -> Worker:
        """Return a worker with the number of its failed calls. One that failed because of a peer counts as before."""
        if failure.kind is FailureClass.COLLECTIVE_FAILED:
            return worker
        return replace(worker, failed_calls=0 if self.trains(worker) else worker.failed_calls + 1)

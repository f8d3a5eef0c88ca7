"""Why workers have ended: their exit code, the error file, the output, torchrun's report and the kernel's OOM kills."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.monitoring.exits.memory_headroom import memory_limit
from elasticjob._runtime.agent.monitoring.exits.worker_exits import (
    OomCounter,
    WorkerExit,
    failure_of,
    left_at,
    read_error_file,
    read_torchrun_report,
    reported_exception,
)
from elasticjob._runtime.agent.reporting.worker_output import TORCHRUN_FAILED
from elasticjob._runtime.agent.start_workers.worker_environment import rendezvous_id
from elasticjob._runtime.agent.workers.worker import EndedWorker, Worker
from elasticjob._runtime.contract.failures.failure_text import MAX_MESSAGE
from elasticjob._runtime.contract.messages import Failure, FailureClass
from elasticjob._runtime.contract.names import Backend, RoundId

FILE_TIME_LAG = 0.02
"""Seconds by which the time of a file may be behind the clock."""


class ExitEvidence:
    """Finds out why workers have ended. `stopping_since` of its methods: when the stop in progress began, Unix seconds;
    None while no stop is in progress."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._oom = OomCounter()
        self._succeeded = set[tuple[RoundId, int]]()
        """Rounds and ranks of workers that have ended with success by themselves."""

    def begin_round(self) -> None:
        """Forget the round before: its successes, and OOM kills that no worker's end accounts for."""
        self._succeeded.clear()
        self._oom.reset()

    def failure(self, worker: Worker, code: int, stopping_since: float | None) -> Failure | None:
        """Return why a worker ended; None when it exited 0, or when the agent's stop ended it."""
        for pipe in worker.pipes:
            pipe.drain()
        if code == 0:
            return None
        out, err = worker.tails
        rank = worker.rank
        if self._config.backend is Backend.C10D:
            rank, code = read_torchrun_report(err.lines) or (rank, code)
        recorded = read_error_file(worker.error_file)
        if recorded is not None and recorded.name == TORCHRUN_FAILED:
            recorded = None
        if stopping_since is not None:
            if not (recorded and recorded.time < stopping_since - FILE_TIME_LAG):
                return None
            code = 1  # the worker had failed before the stop; the signal that ended it was the agent's
        exception = (recorded.name, recorded.text) if recorded else reported_exception(code, err.exception)
        evidence = WorkerExit(
            rank=rank,
            code=code,
            time=recorded.time if recorded else time.time(),
            exception=exception,
            lines=err.lines,
            output=out.lines,
            oom_killed=self._oom.unclaimed,
            memory_limit=memory_limit(),
            place=recorded.place if recorded else err.place,
        )
        failure = failure_of(evidence, self._config.pod)
        if failure.kind is FailureClass.OOM_KILLED:
            self._oom.claim()
        return failure

    def spare_ended(self, code: int) -> None:
        """Record the end of a spare process: an OOM kill that ended it has ended no worker."""
        if code == -signal.SIGKILL and self._oom.unclaimed:
            self._oom.claim()

    def raised(self, worker: Worker, exception: str, text: str) -> Failure:
        """Return the failure of a worker whose function raised an exception."""
        for pipe in worker.pipes:
            pipe.drain()
        out, err = worker.tails
        place = err.place if err.exception and err.exception[0] == exception else ""
        evidence = WorkerExit(
            worker.rank, 1, time.time(), exception=(exception, text), lines=err.lines, output=out.lines, place=place
        )
        return failure_of(evidence, self._config.pod)

    def collective_failed(self, worker: Worker, text: str) -> Failure:
        """Return the failure of a worker in which torch has noticed a failed collective."""
        kind, pod = FailureClass.COLLECTIVE_FAILED, self._config.pod
        return Failure(kind, pod, time.time(), rank=worker.rank, message=text[:MAX_MESSAGE])

    def torchrun_worker(
        self, env: Mapping[str, str], code: int, torchruns: Iterable[Worker], stopping_since: float | None
    ) -> list[EndedWorker]:
        """Return the failure of a torchrun's worker before torchrun reports it, unless torchrun restarts the worker.

        torchrun's own report may come 30 s later: it waits that long for workers stuck in a collective. A worker that
        ended by SIGTERM was stopped by torchrun and has not failed. `env`: the worker's; `torchruns`: those that run.
        """
        if code in (0, -signal.SIGTERM) or env.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            return []
        ended = []
        for torchrun in torchruns:
            if env.get("TORCHELASTIC_RUN_ID") != rendezvous_id(self._config.run_id, torchrun.round):
                continue  # a worker of an earlier round, or of another torchrun
            worker = replace(torchrun, rank=int(env["RANK"]), error_file=env.get("TORCHELASTIC_ERROR_FILE", ""))
            if failure := self.failure(worker, code, stopping_since):
                ended.append(EndedWorker(worker.round, worker.local_rank, failure))
        return ended

    def succeeded(self, worker: Worker, pid: int, stopping_since: float | None) -> None:
        """Record the end of a worker that has not failed. It has succeeded if it ended before a stop, which a handler
        of SIGTERM does not: it may exit with 0 too."""
        left = left_at(worker.error_file, pid) if stopping_since is not None else None
        if stopping_since is None or (left is not None and left < stopping_since):
            self._succeeded.add((worker.round, worker.rank))

    def succeeded_ranks(self, round_id: RoundId) -> tuple[int, ...]:
        """Return the ranks of a round whose workers succeeded before a stop; none for a round before the last one."""
        return tuple(sorted(rank for round_, rank in self._succeeded if round_ == round_id))


def likely_cause_first(ended: Iterable[EndedWorker]) -> list[EndedWorker]:
    """Return ended workers in this order: without a failure, then the likely root cause before its effects."""
    return sorted(ended, key=_order)


def _order(ended: EndedWorker) -> tuple[bool, bool, float]:
    failure = ended.failure
    if failure is None:
        return (False, False, 0.0)
    return (True, failure.kind is FailureClass.COLLECTIVE_FAILED, failure.time)

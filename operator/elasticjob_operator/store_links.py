"""Control links to the jobs' stores: the last report of each, and the operator's word to it.

A link knows nothing of decisions. It pokes the job's key when something has changed; what was said last is said again
when a link comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from elasticjob.contract.messages import Message, OperatorView, Report
from elasticjob.control_link.link import LinkError, LinkRole, Welcome, connect
from elasticjob.keep_alive import KeepAlive
from elasticjob_operator.model.observed import LinkView as LinkView
from elasticjob_operator.plan import StoreAddress

log = logging.getLogger(__name__)

JobKey: TypeAlias = tuple[str, str]
"""Namespace and name of a job."""

FIRST_BACKOFF = 0.1
LONGEST_BACKOFF = 5.0
CONNECT_TIMEOUT = 3.0


class LinkConnection(Protocol):
    """The part of `elasticjob.control_link.link.Link` that is used here."""

    welcome: Welcome

    @property
    def lost_by_keep_alive(self) -> bool: ...
    def send(self, message: Message) -> None: ...
    async def receive(self) -> Message | None: ...
    def close(self) -> None: ...


ConnectStore: TypeAlias = Callable[[StoreAddress, bytes], Awaitable[LinkConnection]]


async def connect_store(address: StoreAddress, key: bytes) -> LinkConnection:
    """Open a link as the operator."""
    interval, attempts = address.keep_alive
    return await connect(
        address.host,
        address.port,
        role=LinkRole.OPERATOR,
        key=key,
        run_id=address.run_id,
        keep_alive=KeepAlive(interval, attempts),
        timeout=CONNECT_TIMEOUT,
    )


@dataclass
class _Job:
    address: StoreAddress | None = None
    key: bytes = b""
    view: LinkView = field(default_factory=LinkView)
    facts: OperatorView | None = None
    wire: LinkConnection | None = None
    task: asyncio.Task[None] | None = None


class StoreLinks:
    """One link per job. `generation` is the Lease's; of two operators, the newer one's words hold."""

    def __init__(
        self,
        poke: Callable[[JobKey], None],
        generation: Callable[[], int],
        connect: ConnectStore = connect_store,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._poke = poke
        self._generation = generation
        self._connect = connect
        self._clock = clock
        self._jobs: dict[JobKey, _Job] = {}
        # Grows over restarts of this process too, where there is no Lease to count them.
        self._sequence = int(clock() * 1000)

    def view(self, key: JobKey) -> LinkView:
        """What is known by the job's link; a job without one was heard of just now."""
        job = self._jobs.get(key)
        return job.view if job else LinkView(since=self._clock())

    def set_address(self, key: JobKey, address: StoreAddress | None, secret: bytes) -> None:
        """Have a link to `address`; None: there is no store that could serve now. Reports of the last store stay."""
        now = self._clock()
        job = self._jobs.setdefault(key, _Job(view=LinkView(since=now)))
        if job.address == address:
            return
        self._stop(job)
        job.address, job.key = address, secret
        job.view = replace(job.view, connected=False, since=now, lost_pods={})
        if address is not None:
            job.task = asyncio.get_running_loop().create_task(self._keep(key, job, address))

    def set_view(self, key: JobKey, facts: OperatorView) -> None:
        """Say `facts` to the job's store, now and whenever the link comes back; nothing is said twice in a row."""
        job = self._jobs.get(key)
        if job is None or facts == job.facts:
            return
        job.facts = facts
        self._say(job)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        job = self._jobs.pop(key, None)
        if job is not None:
            self._stop(job)

    async def close(self) -> None:
        """Close all links."""
        tasks = [job.task for job in self._jobs.values() if job.task]
        for key in list(self._jobs):
            self.forget(key)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _stop(self, job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()
        if job.wire is not None:
            job.wire.close()
        job.task = job.wire = None

    def _say(self, job: _Job) -> None:
        if job.wire is not None and job.facts is not None:
            self._sequence += 1
            job.wire.send(replace(job.facts, lease=self._generation(), sequence=self._sequence))

    async def _keep(self, key: JobKey, job: _Job, address: StoreAddress) -> None:
        backoff = FIRST_BACKOFF
        while True:
            try:
                wire = await self._connect(address, job.key)
            except (LinkError, OSError, asyncio.TimeoutError) as error:
                log.debug("%s/%s: no link to %s: %s", *key, address.pod, error)
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # noqa: S311  # no secret
                backoff = min(LONGEST_BACKOFF, backoff * 2)
                continue
            backoff = FIRST_BACKOFF
            if job.task is not asyncio.current_task():
                # Before Python 3.12 a cancellation that meets the end of a connect is lost.
                wire.close()
                return
            if _is_other(wire.welcome, address):
                log.warning("%s/%s: %s answers as another store", *key, address.pod)
                wire.close()
                await asyncio.sleep(LONGEST_BACKOFF)
                continue
            await self._listen(key, job, wire)

    async def _listen(self, key: JobKey, job: _Job, wire: LinkConnection) -> None:
        job.wire = wire
        self._say(job)
        try:
            while (message := await wire.receive()) is not None:
                if isinstance(message, Report):
                    self._take(key, job, message)
        except LinkError as error:
            log.warning("%s/%s: link to the store: %s", *key, error)
        finally:
            wire.close()
            job.wire = None
            since = self._clock() - (_patience(job) if wire.lost_by_keep_alive else 0.0)
            job.view = replace(job.view, connected=False, since=since, lost_pods={})
            self._poke(key)

    def _take(self, key: JobKey, job: _Job, report: Report) -> None:
        """The store counts as connected with its first report."""
        now = self._clock()
        since = job.view.since if job.view.connected else now
        lost = {pod: job.view.lost_pods.get(pod, now) for pod in report.lost_pods}
        known = job.view.report
        before = known if known is not None and known.incarnation < report.incarnation else job.view.previous_report
        job.view = LinkView(connected=True, since=since, report=report, lost_pods=lost, previous_report=before)
        self._poke(key)


def _patience(job: _Job) -> float:
    """Seconds after which keep-alive gives a silent peer up."""
    interval, attempts = job.address.keep_alive if job.address else (0.0, 0)
    return interval * attempts


def _is_other(welcome: Welcome, address: StoreAddress) -> bool:
    return (welcome.attempt, welcome.incarnation) != (address.attempt, address.incarnation)

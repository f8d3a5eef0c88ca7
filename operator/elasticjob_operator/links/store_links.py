"""Control links to the jobs' stores: the last report of each, and the operator's view that each receives.

Links decide nothing. A link enqueues the job's key when its state or report has changed. Over a new link, the operator
sends its view after the store's first report: that report then shows what the store accepted before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from elasticjob._runtime.contract.messages import Message, OperatorView, Report
from elasticjob._runtime.control_link.link import LinkError, LinkRefused, LinkRole, ReceiveBudget, Welcome, connect
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive
from elasticjob_operator.links.report_frames import FrameDecoder, ReportSource
from elasticjob_operator.links.view_generation import RAISE_AFTER, ViewGeneration
from elasticjob_operator.model.observed import JobKey, LinkView
from elasticjob_operator.plan import StoreAddress

log = logging.getLogger(__name__)

FIRST_BACKOFF = 0.1
"""Seconds until the second attempt to connect; each further failure doubles it."""
LONGEST_BACKOFF = 5.0
LONGEST_END_BACKOFF = 1.0
"""The longest delay after a link that has ended at once, though its store sent nothing wrong."""
SERVED_SECONDS = 1.0
"""Seconds that a link must have lasted so that it is opened again at once."""
MAX_JITTER = 1.2
"""The longest actual delay, as a multiple of these; the shortest one is as much shorter."""
CONNECT_TIMEOUT = 10.0
"""Seconds of one attempt. The TCP connection has its own, shorter time; the rest is long for a busy host only."""
CONNECTING = 128
"""Attempts to connect at the same time. A new operator connects to thousands of stores: if it tried all at once, the
handshakes would take longer than their time, and each that fails must be done again."""
RECEIVED_BYTES = 64 * 2**20
"""Bytes of reports of all stores that may wait at a time. A report of 4096 nodes has some 300 KB."""
TURN_SECONDS = 1.0
"""Seconds after which an attempt without an answer does not count any more: stores that are down delay no others."""


RECEIVED = ReceiveBudget(RECEIVED_BYTES)


class LinkConnection(Protocol):
    """The part of `elasticjob._runtime.control_link.link.Link` that StoreLinks uses."""

    welcome: Welcome

    @property
    def lost_by_keep_alive(self) -> bool: ...
    def send(self, message: Message) -> None: ...
    async def receive(self) -> Message | None: ...
    def close(self) -> None: ...


ConnectStore: TypeAlias = Callable[[StoreAddress, bytes, ReportSource], Awaitable[LinkConnection]]


async def connect_store(address: StoreAddress, key: bytes, source: ReportSource) -> LinkConnection:
    """Open a control link in the role of the operator, over which the reports of `source` come."""
    interval, attempts = address.keep_alive
    link = await connect(
        address.host,
        address.port,
        role=LinkRole.OPERATOR,
        key=key,
        run_id=address.run_id,
        keep_alive=KeepAlive(interval, attempts),
        timeout=CONNECT_TIMEOUT,
    )
    link.decoder = FrameDecoder(source)
    link.share(RECEIVED, group=f"namespace {source.namespace}")
    return link


@dataclass
class _Link:
    """What became of one attempt to follow a store."""

    opened: float | None = None
    """When the link was open; None if it was not."""
    valid: bool = False
    """Whether the store sent nothing but valid reports."""


@dataclass
class _Job:
    generation: ViewGeneration
    source: ReportSource
    address: StoreAddress | None = None
    key: bytes = b""
    view: LinkView = field(default_factory=LinkView)
    operator_view: OperatorView | None = None
    connection: LinkConnection | None = None
    """Set from the first report over the link on."""
    task: asyncio.Task[None] | None = None
    waits: bool = False
    """Whether the first attempt to connect to the address waits for its turn."""
    raising: asyncio.TimerHandle | None = None
    """Runs until the generation of the views is raised."""


class StoreLinks:
    """One control link per job to its store, and one to its standby store.

    `generation` returns the generation of the Lease. Where two operators send views, the store takes those with the
    higher generation (`view_generation`). `raise_after`: seconds until this operator raises the generation of views
    that a store drops; 0 if there is no other operator.
    """

    def __init__(
        self,
        enqueue: Callable[[JobKey], None],
        generation: Callable[[], int],
        connect: ConnectStore = connect_store,
        clock: Callable[[], float] = time.time,
        raise_after: float = RAISE_AFTER,
    ) -> None:
        self._enqueue = enqueue
        self._generation = generation
        self._connect = connect
        self._clock = clock
        self._raise_after = raise_after
        self._jobs: dict[JobKey, _Job] = {}
        self._standbys: dict[JobKey, _Job] = {}
        self._sequence = 0
        self._turns = asyncio.Semaphore(CONNECTING)

    def view(self, key: JobKey) -> LinkView:
        """Return the state of the job's link. A job without a link, or whose link has not been tried, is disconnected
        since now."""
        return self._view(self._jobs.get(key))

    def standby_view(self, key: JobKey) -> LinkView:
        """Return the state of the link to the job's standby store, as `view`."""
        return self._view(self._standbys.get(key))

    def _view(self, job: _Job | None) -> LinkView:
        if job is None:
            return LinkView(since=self._clock())
        return replace(job.view, since=self._clock()) if job.waits else job.view

    def set_address(
        self, key: JobKey, address: StoreAddress | None, secret: bytes, standby: StoreAddress | None = None
    ) -> None:
        """Connect to the store at `address`, and to the standby store at `standby`.

        None: no such store can serve now. The last store's reports are kept. If the standby store becomes the store,
        it keeps its link.
        """
        promoted = self._standbys.get(key)
        if address is not None and promoted is not None and promoted.address == address:
            self._promote(key, self._standbys.pop(key))
        self._connect_to(self._jobs, key, address, secret)
        if standby is None:
            if (job := self._standbys.pop(key, None)) is not None:
                self._stop(job)
        else:
            before = self._standbys.get(key)
            if before is not None and before.address != standby:
                self._stop(self._standbys.pop(key))
            self._connect_to(self._standbys, key, standby, secret)

    def _promote(self, key: JobKey, promoted: _Job) -> None:
        """Make the link to the standby store the job's link."""
        old = self._jobs.get(key)
        previous = old.view.report if old is not None else None
        promoted.view = replace(promoted.view, since=self._clock(), previous_report=previous)
        if old is not None:
            self._stop(old)
        self._jobs[key] = promoted

    def _connect_to(self, jobs: dict[JobKey, _Job], key: JobKey, address: StoreAddress | None, secret: bytes) -> None:
        now = self._clock()
        new = _Job(ViewGeneration(self._generation), ReportSource(namespace=key[0]), view=LinkView(since=now))
        job = jobs.setdefault(key, new)
        job.key = secret
        if address is not None:  # also of a link that is open: the job may have got its pods since
            job.source.pods = max(job.source.pods, address.pods)
        if job.address == address:
            return
        self._stop(job)
        job.address = address
        job.view = replace(job.view, connected=False, since=now, lost_pods={}, refused="")
        if address is not None:
            job.waits = True
            job.task = asyncio.get_running_loop().create_task(self._maintain(key, job, address))

    def set_operator_view(self, key: JobKey, operator_view: OperatorView) -> None:
        """Send a changed view to the job's store, now and after each reconnection."""
        self._set_view(self._jobs.get(key), operator_view)

    def set_standby_view(self, key: JobKey, operator_view: OperatorView) -> None:
        """The same for the job's standby store."""
        self._set_view(self._standbys.get(key), operator_view)

    def _set_view(self, job: _Job | None, operator_view: OperatorView) -> None:
        if job is not None and operator_view != job.operator_view:
            job.operator_view = operator_view
            self._send_view(job)

    def forget(self, key: JobKey) -> None:
        """Close the link of a deleted job."""
        for jobs in (self._jobs, self._standbys):
            if (job := jobs.pop(key, None)) is not None:
                self._stop(job)

    async def close(self) -> None:
        """Close all links."""
        tasks = [job.task for jobs in (self._jobs, self._standbys) for job in jobs.values() if job.task]
        for key in {*self._jobs, *self._standbys}:
            self.forget(key)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _stop(self, job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()
        if job.connection is not None:
            job.connection.close()
        if job.raising is not None:
            job.raising.cancel()
        job.task = job.connection = job.raising = None
        job.waits = False

    def _send_view(self, job: _Job) -> None:
        if job.connection is not None and job.operator_view is not None:
            self._sequence += 1
            numbered = replace(job.operator_view, lease=job.generation.next(), sequence=self._sequence)
            job.connection.send(replace(numbered, sent_at=self._clock()))

    async def _maintain(self, key: JobKey, job: _Job, address: StoreAddress) -> None:
        """Connect and receive reports until cancelled; reconnect with growing delay.

        A link that has served well is opened again at once. One that ends at once, or whose store sends what is no
        report, counts as a failed attempt: such a store would otherwise take the event loop's time without end.
        """
        backoff = ends = FIRST_BACKOFF
        while True:
            link = _Link()
            try:
                await self._follow(key, job, address, link)
            except (LinkError, OSError, asyncio.TimeoutError) as error:
                self._record_refusal(key, job, str(error) if isinstance(error, LinkRefused) else "")
                log.debug("%s/%s: no link to %s: %s", *key, address.pod, error)
            except Exception:  # an unexpected error must not end the link for ever
                log.exception("%s/%s: following %s failed; trying again", *key, address.pod)
                link.valid, backoff, ends = False, LONGEST_BACKOFF, LONGEST_BACKOFF
            if link.opened is None:
                delay, backoff = backoff, min(LONGEST_BACKOFF, backoff * 2)
            elif link.valid and self._clock() >= link.opened + SERVED_SECONDS:
                delay, backoff, ends = 0.0, FIRST_BACKOFF, FIRST_BACKOFF
            else:  # a store that has reported may be well: a longer silence has it replaced
                delay = min(ends, LONGEST_END_BACKOFF) if link.valid else ends
                backoff, ends = FIRST_BACKOFF, min(LONGEST_BACKOFF, ends * 2)
            await asyncio.sleep(delay * random.uniform(2 - MAX_JITTER, MAX_JITTER))  # noqa: S311  # no secret

    async def _follow(self, key: JobKey, job: _Job, address: StoreAddress, link: _Link) -> None:
        """Connect, and receive reports until the link ends; note in `link` what became of it."""
        async with self._turn(job):
            connection = await self._connect(address, job.key, job.source)
        if _is_other_store(connection.welcome, address):
            log.warning("%s/%s: at the address of %s, another store answers; trying again", *key, address.pod)
            connection.close()
            await asyncio.sleep(LONGEST_BACKOFF)
            return
        link.opened = self._clock()
        link.valid = await self._receive_reports(key, job, connection)

    @contextlib.asynccontextmanager
    async def _turn(self, job: _Job) -> AsyncIterator[None]:
        """Wait until few other attempts to connect are under way."""
        await self._turns.acquire()
        held = [self._turns]

        def end() -> None:
            if held:
                held.pop().release()

        timer = asyncio.get_running_loop().call_later(TURN_SECONDS, end)
        if job.waits:
            job.waits, job.view = False, replace(job.view, since=self._clock())
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def _receive_reports(self, key: JobKey, job: _Job, connection: LinkConnection) -> bool:
        """Record reports until the link ends; return False if the store sent something else."""
        try:
            while (message := await connection.receive()) is not None:
                if isinstance(message, Report):
                    self._check_generation(job, message)
                    self._record_report(key, job, message)
                    if job.connection is None:
                        job.connection = connection
                        self._send_view(job)
        except LinkError as error:
            log.warning("%s/%s: the link to the store failed: %s", *key, error)
            return False
        else:
            return True
        finally:
            connection.close()
            job.connection = None
            since = self._clock() - (_keep_alive_timeout(job) if connection.lost_by_keep_alive else 0.0)
            job.view = replace(job.view, connected=False, since=since, lost_pods={})
            self._enqueue(key)

    def _check_generation(self, job: _Job, report: Report) -> None:
        """Send the view again with a higher generation, after a delay, if the store drops this operator's views."""
        if job.generation.is_stale(report.view_lease) and job.raising is None:
            loop = asyncio.get_running_loop()
            job.raising = loop.call_later(self._raise_after, self._raise_generation, job)

    def _raise_generation(self, job: _Job) -> None:
        job.raising = None
        if job.view.report is not None:
            job.generation.raise_above(job.view.report.view_lease)
            self._send_view(job)

    def _record_refusal(self, key: JobKey, job: _Job, refused: str) -> None:
        if job.view.refused != refused:
            job.view = replace(job.view, refused=refused)
            self._enqueue(key)

    def _record_report(self, key: JobKey, job: _Job, report: Report) -> None:
        """Make `report` the job's last one. The store counts as connected from its first report on."""
        now = self._clock()
        since = job.view.since if job.view.connected else now
        lost = {pod: job.view.lost_pods.get(pod, now) for pod in report.lost_pods}
        last, previous = job.view.report, job.view.previous_report
        if last is not None and last.incarnation < report.incarnation:
            previous = last
        view = LinkView(connected=True, since=since, report=report, lost_pods=lost, previous_report=previous)
        # A store reports once more when it has this operator's view. No decision depends on that.
        as_before = last is not None and replace(view, report=replace(report, view_lease=last.view_lease)) == job.view
        job.view = view
        if not as_before:
            self._enqueue(key)


def _keep_alive_timeout(job: _Job) -> float:
    """Return the seconds of silence after which TCP keep-alive closes a connection."""
    return KeepAlive(*job.address.keep_alive).timeout if job.address else 0.0


def _is_other_store(welcome: Welcome, address: StoreAddress) -> bool:
    return (welcome.attempt, welcome.incarnation) != (address.attempt, address.incarnation)

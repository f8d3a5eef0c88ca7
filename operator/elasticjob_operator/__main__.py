"""`elasticjob-operator`: acquire the Lease, then watch and reconcile ElasticJobs until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from elasticjob._runtime.contract.names import GROUP, PLURAL
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob._runtime.system.daemon_threads import run_without_joining
from elasticjob_operator import logs, metrics
from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.kube import CRDS, KubeApi, KubeError, NotFound, Throttled, Unclear
from elasticjob_operator.kube.client import KubeClient, NoCluster, connect_cluster
from elasticjob_operator.lease import REQUEST_TIMEOUT, Election, LeaseLost
from elasticjob_operator.links.store_links import StoreLinks
from elasticjob_operator.links.view_generation import RAISE_AFTER
from elasticjob_operator.loop_thread import LoopSilence, LoopThread
from elasticjob_operator.manifests.placement import HOSTNAME
from elasticjob_operator.model.cluster.raw import mapping, objects
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.queue.workqueue import WorkQueue
from elasticjob_operator.reconcile import keys
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.serving import probes
from elasticjob_operator.serving.http_server import Certificate
from elasticjob_operator.serving.metrics_page import MetricsAccess, serve_metrics
from elasticjob_operator.settings import OperatorSettings, parse_settings
from elasticjob_operator.steady_clock import SteadyClock
from elasticjob_operator.watch import handlers
from elasticjob_operator.watch.defaults_file import DefaultsFile
from elasticjob_operator.watch.node_events import NodeEvents
from elasticjob_operator.watch.watch_cache import WatchCache
from elasticjob_operator.watch.watches import Watches

T = TypeVar("T")

log = logging.getLogger(__name__)

API_CHECK_SECONDS = 30.0
REVIEW_TIMEOUT = 4.0
"""Seconds of a request about a token. Prometheus waits 10 s for the metrics by default, and there are two requests."""
FIRST_API_RETRY = 1.0
"""Seconds until a starting operator repeats a request that got no answer; each further failure doubles it."""
LONGEST_API_RETRY = 10.0
FIRST_RECONCILES_SECONDS = 10.0
"""Longest time for which a new leader waits for the first reconcile of each job until it freezes what it has listed."""
NEW_OBJECTS = 50_000
"""Objects that are made until Python looks for cycles among them (its default: 700). A list of pods makes millions, and
none is in a cycle."""
CRD_NAME = f"{PLURAL}.{GROUP}"
NEWEST_STATUS_FIELD = "defaults"
"""The field that the CRD's status got last. Without it, the API server would drop what the operator decides, or each
reconcile would write it again."""
_STATUS_FIELDS = ("schema", "openAPIV3Schema", "properties", "status", "properties")


class CannotStart(Exception):  # noqa: N818
    """The operator cannot start; the message tells the administrator what to fix."""


async def check_crd(api: KubeApi) -> None:
    """Raise CannotStart where the ElasticJob CRD is not installed (no watch would find a job) or is older
    than this operator (the API server would drop status fields that the operator relies on)."""
    try:
        crd = await until_answered(lambda: api.get(CRDS, None, CRD_NAME))
    except NotFound:
        raise CannotStart(
            f"the CustomResourceDefinition {CRD_NAME} is not installed: apply crds/elasticjobs.yaml"
        ) from None
    except KubeError as error:
        raise CannotStart(f"the operator cannot read {CRD_NAME} from the API server: {error}") from None
    schemas = (mapping(version, *_STATUS_FIELDS) for version in objects(crd, "spec", "versions"))
    if not any(NEWEST_STATUS_FIELD in schema for schema in schemas):
        raise CannotStart(
            f"the CustomResourceDefinition {CRD_NAME} is older than this operator: apply crds/elasticjobs.yaml"
        )


async def until_answered(request: Callable[[], Awaitable[T]]) -> T:
    """Return the response of the request; repeat it while the API server does not answer."""
    failures = 0
    while True:
        try:
            return await request()
        except (Throttled, Unclear) as error:
            failures += 1
            delay = doubling_delay(FIRST_API_RETRY, LONGEST_API_RETRY, failures)
            log.warning("%s; the operator tries again in %.0f s", error, delay)
            await asyncio.sleep(delay)


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run the coroutines until one of them ends, then cancel the others and wait for their end; raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Operator:
    """The parts of a running operator."""

    settings: OperatorSettings
    api: KubeClient
    lease_api: KubeClient
    """The client of the leader election: no other request may delay its requests. Only `lease_thread` uses it."""
    events_api: KubeApi
    """The client of Events, which delay no other request."""
    lease_thread: LoopThread
    """Runs the leader election: lists and reconciles that keep the event loop busy delay no renewal."""
    stop: asyncio.Event
    _queue: WorkQueue[JobKey] | None = None
    _watches: Watches | None = None
    _defaults: DefaultsFile = field(init=False)

    def __post_init__(self) -> None:
        self._defaults = DefaultsFile(self.settings.job_defaults)

    async def run(self) -> None:
        """Run until `stop` is set; raise an exception where the process must end at once."""
        loop = asyncio.get_running_loop()

        def oldest_wait() -> float:
            queue = self._queue
            return queue.oldest_wait() if queue is not None else 0.0

        def silence() -> float:
            return max(0.0, loop.time() - max(self.api.last_success, self.lease_api.last_success))

        def blind() -> str:
            return self._watches.describe_blindness() if self._watches is not None else ""

        metrics.queue_depth.set_function(lambda: 0 if self._queue is None else self._queue.due())
        metrics.queue_wait.set_function(oldest_wait)
        metrics.api_silence.set_function(silence)
        port = self.settings.health_port
        served = probes.serve_probes(port, oldest_wait, silence, blind) if port else None
        try:
            await self._defaults.read()
            await run_until_one_ends(self._run_terms(), self._defaults.follow(), self.stop.wait())
        finally:
            if served is not None:
                await served.close()

    async def _run_terms(self) -> None:
        """Lead until cancelled. An operator that loses the Lease is a candidate again, without any earlier state."""
        await check_crd(self.api)
        if not self.settings.leader_election:
            metrics.leader.set(1)
            await run_until_one_ends(self._reconcile_jobs(None), self._check_api())
            return
        for term in itertools.count():
            try:
                await self._lead(self.new_election(term))
            except LeaseLost as error:
                log.error("%s; this operator has stopped its work and is a candidate again", error)
            gc.unfreeze()  # what the term has left
            gc.collect()

    def new_election(self, term: int) -> Election:
        # Each term has an identity of its own: stores then see a new generation of the Lease.
        s = self.settings
        identity = f"{s.identity}-{term}" if term else s.identity
        silence = LoopSilence(asyncio.get_running_loop())
        return Election(self.lease_api, s.namespace, s.lease_name, identity, silence=silence.seconds)

    async def _lead(self, election: Election) -> None:
        """Acquire the Lease and reconcile until cancelled; release the Lease once all work has stopped. Do so too if
        it was acquired during the cancellation."""
        run = self.lease_thread.run
        try:
            await run(election.acquire())
            self.api.may_write = election.may_write
            metrics.leader.set_function(election.may_write)
            await run_until_one_ends(self._reconcile_jobs(election), run(election.renew()))
        finally:
            metrics.leader.set_function(lambda: 0)
            await run(election.release())

    async def _assemble(
        self, election: Election | None, clock: SteadyClock
    ) -> tuple[WorkQueue[JobKey], StoreLinks, WatchCache, Recorder]:
        s = self.settings
        try:
            job_keys = await until_answered(lambda: keys.load_keys(self.api, s.namespace, s.master_secret))
        except (KubeError, ValueError) as error:
            raise CannotStart(f"the master key is unavailable: {error}") from None

        async def reconcile(key: JobKey) -> float | None:
            return await controller.reconcile(key)

        # Jobs of all namespaces take turns: a key begins with the namespace.
        queue: WorkQueue[JobKey] = WorkQueue(reconcile, group_of=itemgetter(0))
        links = StoreLinks(
            queue.enqueue,
            lambda: election.generation if election else 0,
            clock=clock,
            raise_after=RAISE_AFTER if election else 0.0,
        )
        recorder = Recorder(self.events_api, s.identity)
        nodes_watched = None if s.watches_nodes else False
        watched = WatchCache(queue.enqueue, s.kueue, s.eviction_requests, nodes_watched)
        controller = Controller(
            self.api, job_keys, links, recorder, s.image, s.resync_seconds, clock, watched, s.pod_namespace,
            s.topology_labels[-1] if s.topology_labels else HOSTNAME,
            self._defaults.of, s.label_namespaces,
        )  # fmt: skip
        return queue, links, watched, recorder

    async def _reconcile_jobs(self, election: Election | None) -> None:
        """Watch and reconcile until cancelled; raise the error of a task that fails."""
        clock = SteadyClock()
        queue, links, watched, recorder = await self._assemble(election, clock)
        self._queue = queue
        try:
            await run_until_one_ends(self._follow(queue, watched, clock), recorder.run())
        finally:
            self._queue = self._watches = None
            metrics.jobs.clear()
            await links.close()
            await recorder.finish()

    async def _follow(self, queue: WorkQueue[JobKey], cache: WatchCache, clock: SteadyClock) -> None:
        """List all jobs and pods, so that none must be read alone; then reconcile jobs, and watch, until cancelled."""
        s = self.settings
        nodes = NodeEvents(cache, s.notice_keys, s.topology_labels, clock) if s.watches_nodes else None
        watched = handlers.watched(handlers.event_registry(cache, nodes), cache, nodes)
        watches = self._watches = Watches(self.api, watched, s.watch_namespaces)
        await watches.list_first()
        compare = self._compare(queue, cache, watches)
        await run_until_one_ends(queue.run(s.workers), watches.run(), compare)

    async def _compare(self, queue: WorkQueue[JobKey], cache: WatchCache, watches: Watches) -> None:
        """Compare the cache with the API server from time to time."""
        # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that arrives together with the end.
        idle = asyncio.create_task(queue.idle())
        try:
            await asyncio.wait({idle}, timeout=FIRST_RECONCILES_SECONDS)
        finally:
            idle.cancel()
        gc.collect(1)  # what is frozen is never freed if it is in a cycle
        gc.freeze()  # a search for cycles in all that was listed stops every thread for a part of a second
        while True:
            await asyncio.sleep(self.settings.resync_seconds)
            cache.forget_ends()
            await watches.compare()

    async def _check_api(self) -> None:
        """Send a request every 30 s, so that /readyz notices a lost API server also without Lease renewals."""
        while True:
            await asyncio.sleep(API_CHECK_SECONDS)
            with contextlib.suppress(KubeError):
                await self.api.get(CRDS, None, CRD_NAME)


@contextlib.asynccontextmanager
async def _served_metrics(settings: OperatorSettings, api: KubeClient) -> AsyncIterator[None]:
    if not settings.metrics_port:
        yield
        return
    reviews = api.separate(timeout=REVIEW_TIMEOUT)  # only the thread of the metrics uses it
    try:
        certificate = Certificate(Path(settings.metrics_tls)) if settings.metrics_tls else None
    except OSError as error:  # ssl.SSLError is one
        raise CannotStart(f"the certificate in {settings.metrics_tls} cannot be used: {error}") from None
    access = MetricsAccess(reviews) if settings.metrics_authentication else None
    server = serve_metrics(settings.metrics_port, access, certificate)
    try:
        yield
    finally:
        await server.close(reviews.close())


async def run(settings: OperatorSettings) -> None:
    """Run the operator in this process until SIGTERM or SIGINT."""
    raise_open_file_limit()  # a job needs two: the links to its store and to its standby store
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        api = await connect_cluster(rate=settings.qps, burst=settings.burst)
    except NoCluster as error:
        raise CannotStart(
            f"the operator finds no cluster: {error}. Set KUBECONFIG, or run the operator in a pod"
        ) from None
    lease_api, lease_thread = api.separate(timeout=REQUEST_TIMEOUT), LoopThread("lease")
    try:
        async with _served_metrics(settings, api):
            await Operator(settings, api, lease_api, api.background(), lease_thread, stop).run()
    finally:
        await lease_thread.run(lease_api.close())
        await lease_thread.close()
        await api.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; return 1 where it could not start."""
    settings = parse_settings(argv)
    logs.configure(settings.log_level, settings.log_format)
    gc.set_threshold(NEW_OBJECTS)
    try:
        run_without_joining(run(settings))
    except CannotStart as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

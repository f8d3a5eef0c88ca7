"""`elasticjob-operator`: acquire the Lease, then watch and reconcile ElasticJobs until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import prometheus_client

from elasticjob.contract.names import GROUP, PLURAL
from elasticjob_operator import handlers, keys, logs, metrics, probes
from elasticjob_operator.controller import Controller
from elasticjob_operator.events import Recorder
from elasticjob_operator.kube import CRDS, KubeApi, KubeError, NotFound
from elasticjob_operator.kube.client import KubeClient, NoCluster, connect_cluster
from elasticjob_operator.lease import Election, LeaseLost
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.settings import OperatorSettings, parse_settings
from elasticjob_operator.store_links import StoreLinks
from elasticjob_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

API_CHECK_SECONDS = 30.0
CRD_NAME = f"{PLURAL}.{GROUP}"


class CannotStart(Exception):  # noqa: N818
    """The operator cannot start; the message tells the administrator what to fix."""


async def check_crd(api: KubeApi) -> None:
    """Raise CannotStart where the ElasticJob CRD is not installed; kopf would wait for it without an error."""
    try:
        await api.get(CRDS, None, CRD_NAME)
    except NotFound:
        raise CannotStart(
            f"the CustomResourceDefinition {CRD_NAME} is not installed: apply crds/elasticjobs.yaml"
        ) from None
    except KubeError as error:
        raise CannotStart(f"the operator cannot read {CRD_NAME} from the API server: {error}") from None


@dataclass
class Operator:
    """The parts of a running operator."""

    settings: OperatorSettings
    api: KubeClient
    stop: asyncio.Event

    async def run(self) -> None:
        """Run until `stop` is set; raise an exception where the process must end at once."""
        loop = asyncio.get_running_loop()
        queue: WorkQueue[JobKey] | None = None
        runner = None
        if self.settings.health_port:
            runner = await probes.serve_probes(
                self.settings.health_port,
                lambda: queue.oldest_wait() if queue else 0.0,
                lambda: loop.time() - self.api.last_success,
            )
        try:
            await check_crd(self.api)
            election = self._election()
            if election is not None and not await self._acquire(election):
                return
            queue, links = await self._assemble(election)
            await self._reconcile_jobs(queue, links, election)
        finally:
            if runner is not None:
                await runner.cleanup()

    def _election(self) -> Election | None:
        s = self.settings
        return Election(self.api, s.namespace, s.lease_name, s.identity) if s.leader_election else None

    async def _acquire(self, election: Election) -> bool:
        """Wait for leadership; return False when `stop` is set first."""
        acquired, stopped = asyncio.create_task(election.acquire()), asyncio.create_task(self.stop.wait())
        await asyncio.wait((acquired, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if acquired.done():
            acquired.result()
            return True
        acquired.cancel()
        return False

    async def _assemble(self, election: Election | None) -> tuple[WorkQueue[JobKey], StoreLinks]:
        s = self.settings
        try:
            job_keys = await keys.load_keys(self.api, s.namespace, s.master_secret)
        except (KubeError, ValueError) as error:
            raise CannotStart(f"the master key is unavailable: {error}") from None

        async def reconcile(key: JobKey) -> float | None:
            metrics.queue_depth.set(len(queue))
            return await controller.reconcile(key)

        queue: WorkQueue[JobKey] = WorkQueue(reconcile)
        links = StoreLinks(queue.enqueue, lambda: election.generation if election else 0)
        recorder = Recorder(self.api, s.identity)
        controller = Controller(self.api, job_keys, links, recorder, s.image, s.resync_seconds)
        return queue, links

    async def _reconcile_jobs(self, queue: WorkQueue[JobKey], links: StoreLinks, election: Election | None) -> None:
        """Watch and reconcile until `stop` is set, then release the Lease; raise the error of a task that fails."""
        reconciling = asyncio.create_task(queue.run(self.settings.workers))
        watching = asyncio.create_task(handlers.watch_events(queue.enqueue, self.settings.watch_namespaces))
        stopped = asyncio.create_task(self.stop.wait())
        tasks: set[asyncio.Task[object]] = {reconciling, watching, stopped}
        tasks.add(asyncio.create_task(election.renew() if election is not None else self._check_api()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await links.close()
        if election is not None:
            await election.release()

    async def _check_api(self) -> None:
        """Send a request every 30 s, so that /healthz notices a lost API server also without Lease renewals."""
        while True:
            await asyncio.sleep(API_CHECK_SECONDS)
            with contextlib.suppress(KubeError):
                await self.api.get(CRDS, None, CRD_NAME)


async def run(settings: OperatorSettings) -> None:
    """Run the operator in this process until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        api = await connect_cluster(rate=settings.qps, burst=settings.burst)
    except NoCluster as error:
        raise CannotStart(
            f"the operator finds no cluster: {error}. Set KUBECONFIG, or run the operator in a pod"
        ) from None
    if settings.metrics_port:
        prometheus_client.start_http_server(settings.metrics_port)
    try:
        await Operator(settings, api, stop).run()
    finally:
        await api.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; return 1 where it could not start, lost the Lease or lost its watch."""
    settings = parse_settings(argv)
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(run(settings))
    except (CannotStart, LeaseLost, handlers.WatchEnded) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""kopf handlers: each watch event of a job, its pods or its Workload goes into the cache, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import kopf

from elasticjob.contract.names import GROUP, PLURAL, VERSION, Label
from elasticjob.daemon_threads import DaemonExecutor, run_without_joining
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.kube.client import PAGE
from elasticjob_operator.model.raw import Raw, mapping, text
from elasticjob_operator.watch_cache import WatchCache

WATCH_SECONDS = 600
REQUEST_SECONDS = 30
IDLE_SECONDS = 0.1
"""Seconds for which kopf keeps the last event of each object."""


See: TypeAlias = Callable[[Raw, bool], None]
"""Called with an object, and whether it no longer exists."""


def event_registry(see_job: See, see_pod: See, see_workload: See | None) -> kopf.OperatorRegistry:
    """Return kopf handlers that hand each event over; `see_workload` None: Workloads are not watched."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def job(event: Any, **_: Any) -> None:
        see_job(mapping(event, "object"), text(event, "type") == "DELETED")

    @kopf.on.event("", "v1", "pods", labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
    async def pod(event: Any, **_: Any) -> None:
        see_pod(mapping(event, "object"), text(event, "type") == "DELETED")

    if see_workload is None:
        return handlers
    kueue = (KUEUE_WORKLOADS.group, KUEUE_WORKLOADS.version, KUEUE_WORKLOADS.plural)

    @kopf.on.event(*kueue, labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
    async def workload(event: Any, **_: Any) -> None:
        see_workload(mapping(event, "object"), text(event, "type") == "DELETED")

    return handlers


class _NoDifference(kopf.DiffBaseStorage):
    """Spares kopf to find out what has changed in an object: no handler asks for it, and it copies each object."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings that turn off kopf's scanning, peering, Events and differences; only watching is used."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDifference()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.chunk_size = PAGE  # by default kopf asks for all at once
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.connect_timeout = REQUEST_SECONDS
    settings.watching.label_selectors["pods"] = Label.JOB_NAME
    settings.watching.label_selectors[KUEUE_WORKLOADS.group, KUEUE_WORKLOADS.plural] = Label.JOB_NAME
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.connect_timeout = REQUEST_SECONDS
    settings.execution.executor = DaemonExecutor()  # Python would join kopf's own threads at the end of the process
    return settings


class WatchEnded(Exception):  # noqa: N818
    """kopf stopped watching; the process must end, and its pod restarts it."""


async def watch_events(cache: WatchCache, namespaces: tuple[str, ...]) -> None:
    """Watch until cancelled; raise WatchEnded when kopf stops. Empty `namespaces`: watch all.

    kopf runs in a thread with an event loop of its own: it handles the signals and cancels the tasks of the loop that
    it runs in, and waits seconds for those tasks when it stops.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = threading.Event()

    def fail(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(WatchEnded(f"the watch on the API server ended: {error or 'kopf gave no reason'}"))

    def call_in_loop(call: Callable[..., None], *args: Any) -> None:
        # RuntimeError: the operator has closed its loop, and needs no more watch events.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call, *args)

    see_workload = partial(call_in_loop, cache.see_workload) if cache.kueue else None
    registry = event_registry(partial(call_in_loop, cache.see_job), partial(call_in_loop, cache.see_pod), see_workload)

    def watch() -> None:
        try:
            run_without_joining(_watch(registry, namespaces, stop))
        except BaseException as error:  # an exception in a thread would only be printed
            call_in_loop(fail, error)
        else:
            call_in_loop(fail, None)

    threading.Thread(target=watch, name="kopf", daemon=True).start()
    try:
        await ended
    finally:
        stop.set()


async def _watch(registry: kopf.OperatorRegistry, namespaces: tuple[str, ...], stop: threading.Event) -> None:
    await kopf.operator(
        registry=registry,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )

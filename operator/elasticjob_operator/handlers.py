"""kopf handlers: each watch event of a job or of one of its pods enqueues the job's key, and does nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import kopf

from elasticjob.contract.names import GROUP, PLURAL, VERSION, Label
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.model.raw import text

WATCH_SECONDS = 600
REQUEST_SECONDS = 30


def event_registry(enqueue: Callable[[JobKey], None]) -> kopf.OperatorRegistry:
    """Return kopf handlers that call `enqueue` with the key of the job that a watch event concerns."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def job(body: Any, **_: Any) -> None:
        enqueue((text(body, "metadata", "namespace"), text(body, "metadata", "name")))

    @kopf.on.event("", "v1", "pods", labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
    async def pod(body: Any, **_: Any) -> None:
        enqueue((text(body, "metadata", "namespace"), text(body, "metadata", "labels", Label.JOB_NAME)))

    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings that turn off kopf's scanning, peering and Events; only watching is used."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.connect_timeout = REQUEST_SECONDS
    settings.watching.label_selectors["pods"] = Label.JOB_NAME
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.connect_timeout = REQUEST_SECONDS
    return settings


class WatchEnded(Exception):  # noqa: N818
    """kopf stopped watching; the process must end, and its pod restarts it."""


async def watch_events(enqueue: Callable[[JobKey], None], namespaces: tuple[str, ...]) -> None:
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

    def watch() -> None:
        try:
            asyncio.run(_watch(lambda key: call_in_loop(enqueue, key), namespaces, stop))
        except BaseException as error:  # an exception in a thread would only be printed
            call_in_loop(fail, error)
        else:
            call_in_loop(fail, None)

    threading.Thread(target=watch, name="kopf", daemon=True).start()
    try:
        await ended
    finally:
        stop.set()


async def _watch(enqueue: Callable[[JobKey], None], namespaces: tuple[str, ...], stop: threading.Event) -> None:
    await kopf.operator(
        registry=event_registry(enqueue),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )

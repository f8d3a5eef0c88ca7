"""kopf as a doorbell: every event of a job or one of its pods pokes the job's key, and does nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import kopf

from elasticjob.contract.names import GROUP, PLURAL, VERSION, Label
from elasticjob_operator.model.raw import text

JobKey: TypeAlias = tuple[str, str]
"""Namespace and name of a job."""

WATCH_SECONDS = 600
REQUEST_SECONDS = 30


def event_registry(poke: Callable[[JobKey], None]) -> kopf.OperatorRegistry:
    """Handlers that ring for `poke(namespace, name)`."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def job(body: Any, **_: Any) -> None:
        poke((text(body, "metadata", "namespace"), text(body, "metadata", "name")))

    @kopf.on.event("", "v1", "pods", labels={Label.JOB_NAME: kopf.PRESENT}, registry=handlers)
    async def pod(body: Any, **_: Any) -> None:
        poke((text(body, "metadata", "namespace"), text(body, "metadata", "labels", Label.JOB_NAME)))

    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    """No scanning, no peering, no Events, no annotations of kopf's own."""
    chosen = kopf.OperatorSettings()
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.watching.server_timeout = WATCH_SECONDS
    chosen.watching.connect_timeout = REQUEST_SECONDS
    chosen.watching.label_selectors["pods"] = Label.JOB_NAME
    chosen.networking.request_timeout = REQUEST_SECONDS
    chosen.networking.connect_timeout = REQUEST_SECONDS
    return chosen


class WatchEnded(Exception):  # noqa: N818
    """kopf gave up; the process must start anew."""


async def watch_events(poke: Callable[[JobKey], None], namespaces: tuple[str, ...]) -> None:
    """Watch until cancelled; `WatchEnded` when kopf cannot go on.

    kopf has a thread and a loop to itself: it takes its loop's signals and stray tasks for its own, and waits seconds
    for them when it stops.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = threading.Event()

    def give_up(why: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(WatchEnded(f"the watch has ended: {why or 'no reason given'}"))

    def across(call: Callable[..., None], *args: Any) -> None:
        # The loop may have been closed meanwhile: then nobody listens any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call, *args)

    def watch() -> None:
        try:
            asyncio.run(_watch(lambda key: across(poke, key), namespaces, stop))
        except BaseException as error:  # a thread's errors reach nobody else
            across(give_up, error)
        else:
            across(give_up, None)

    threading.Thread(target=watch, name="kopf", daemon=True).start()
    try:
        await ended
    finally:
        stop.set()


async def _watch(poke: Callable[[JobKey], None], namespaces: tuple[str, ...], stop: threading.Event) -> None:
    await kopf.operator(
        registry=event_registry(poke),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )

"""kopf as a doorbell: every event of a job or one of its pods pokes the job's key, and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import kopf

from elasticjob.contract.names import GROUP, PLURAL, VERSION, Label
from elasticjob_operator.model.raw import text

WATCH_SECONDS = 600
REQUEST_SECONDS = 30


def registry(poke: Callable[[tuple[str, str]], None]) -> kopf.OperatorRegistry:
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


def settings() -> kopf.OperatorSettings:
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


async def ring(poke: Callable[[tuple[str, str]], None], namespaces: tuple[str, ...], stop: asyncio.Event) -> None:
    """Watch until `stop`; an error of a watch that kopf cannot repair is raised."""
    await kopf.operator(
        registry=registry(poke),
        settings=settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )

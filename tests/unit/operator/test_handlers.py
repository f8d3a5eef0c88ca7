"""The watch on the API server, against an HTTP server on this machine that has one job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from elasticjob.contract.names import GROUP, KIND, PLURAL, VERSION
from elasticjob_operator.handlers import watch_events
from elasticjob_operator.kube.api import KUEUE_WORKLOADS
from elasticjob_operator.model.observed import JobKey
from elasticjob_operator.watch_cache import WatchCache

OWNER = {"kind": KIND, "uid": "u", "controller": True}
LABELS = {"elasticjob.dev/job-name": "bert", "elasticjob.dev/job-uid": "u"}
NAMES = {"name": "w", "namespace": "ns", "uid": "w", "resourceVersion": "1"}
WORKLOAD = {"metadata": {**NAMES, "labels": LABELS, "ownerReferences": [OWNER]}}
KUEUE, KUEUE_VERSION = KUEUE_WORKLOADS.group, KUEUE_WORKLOADS.version
JOB = {"metadata": {"name": "bert", "namespace": "ns", "uid": "u", "resourceVersion": "1"}}


def resources(*kinds: tuple[str, str]) -> dict[str, Any]:
    """Return a discovery response."""
    verbs = ["list", "watch", "get"]
    return {
        "resources": [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind != "Namespace",
                "verbs": verbs,
            }
            for plural, kind in kinds
        ]
    }


RESPONSES = {
    "/api": {"versions": ["v1"]},
    "/apis": {
        "groups": [
            {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}
            for name, version in ((GROUP, VERSION), (KUEUE, KUEUE_VERSION))
        ]
    },
    "/api/v1": resources(("pods", "Pod"), ("namespaces", "Namespace"), ("events", "Event")),
    f"/apis/{GROUP}/{VERSION}": resources((PLURAL, KIND)),
    f"/apis/{KUEUE}/{KUEUE_VERSION}": resources(("workloads", "Workload")),
    f"/apis/{KUEUE}/{KUEUE_VERSION}/workloads": {"metadata": {"resourceVersion": "1"}, "items": [WORKLOAD]},
    f"/apis/{GROUP}/{VERSION}/{PLURAL}": {"metadata": {"resourceVersion": "1"}, "items": [JOB]},
}


@pytest.fixture
async def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Serve the responses, and configure the Kubernetes client for the server."""
    stopped = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(RESPONSES.get(request.path, {"metadata": {"resourceVersion": "1"}, "items": []}))
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stopped.wait()
        return stream

    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    # The client reads KUBECONFIG when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    yield
    stopped.set()
    await runner.cleanup()


@pytest.mark.usefixtures("api_server")
async def test_a_process_can_watch_again_after_it_has_stopped() -> None:
    """An operator that lost the Lease leads again in the same process."""
    for _ in range(2):
        events: asyncio.Queue[JobKey] = asyncio.Queue()
        watching = asyncio.create_task(watch_events(WatchCache(events.put_nowait), ()))
        try:
            assert await asyncio.wait_for(events.get(), 30.0) == ("ns", "bert")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.usefixtures("api_server")
async def test_workloads_of_kueue_are_watched_on_request() -> None:
    seen = asyncio.Event()
    cache = WatchCache(kueue=True)
    cache.on_event = lambda _: seen.set() if cache.workloads("u") else None
    watching = asyncio.create_task(watch_events(cache, ()))
    try:
        await asyncio.wait_for(seen.wait(), 30.0)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

"""The operator's watches: one for each resource and namespace, and each is retried for ever by itself.

A watch lists its objects, and then follows them from the list's resourceVersion on. Where it fails, it is tried again
after a delay that grows, while the other watches go on: if a permission, a namespace or a CRD is removed and comes
back, the watch recovers without a restart of the operator.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from elasticjob_operator import metrics
from elasticjob_operator.backoff import doubling_delay
from elasticjob_operator.kube import JOBS, NODES, PODS, KubeError, Resource, Unclear
from elasticjob_operator.kube.errors import error_from
from elasticjob_operator.model.cluster.raw import integer, mapping, text, whole_number
from elasticjob_operator.watch.watch_cache import Lister

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 1.0
"""Seconds until a failed watch is tried again, before jitter; each further failure doubles it."""
LONGEST_RETRY_SECONDS = 60.0
SHORT_WATCH_SECONDS = 5.0
"""A watch counts as working once it has lasted this long or delivered an event. One that ends earlier counts as a
failure, because the next ones may end as quickly."""
FIRST_LIST_SECONDS = 20.0
"""Seconds that a new leader waits for all first lists of Workloads and Nodes together. Their watches try again."""
MAX_WATCH_FAILURE = 120.0
"""If the watches of a resource have failed for this many seconds in all namespaces, the operator is not ready. A watch
that has worked must be refused this long before `WatchedResource.refused` is called."""
_GONE = 410
"""HTTP status, and code of an event: the API server does not have the events from this resourceVersion on any more."""
_BUSY = 429
_NO_PERMISSION = (401, 403)
_LISTED_BEFORE_WORK = (PODS, JOBS)
"""What a new leader must have listed, or failed to list, before it reconciles jobs."""


class WatchApi(Lister, Protocol):
    """The calls of the API server that a watch needs."""

    def watch(
        self, resource: Resource, namespace: str | None, version: str, selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Open a watch from this resourceVersion on; the value is its events."""
        ...


@dataclass(frozen=True)
class WatchedResource:
    """What is watched of a resource, and what becomes of its objects."""

    resource: Resource
    selector: str
    handle: Callable[[dict[str, Any]], Awaitable[None]]
    """Called with each event but bookmarks and errors, one after the other."""
    list: Callable[[WatchApi, str | None], Awaitable[str]]
    """Lists all objects of a namespace (None: of all), compares them with what is known, and returns the list's
    resourceVersion."""
    refused: Callable[[], None] = lambda: None
    """Called when the operator has no permission. An API server that starts, or that a webhook for authorization does
    not answer, refuses for a short time what is permitted: a watch that has listed once must be refused for
    MAX_WATCH_FAILURE."""
    needed: bool = True
    """Whether the operator is not ready without it."""


class Watch:
    """The watch of one resource in one namespace (None: in all)."""

    def __init__(
        self,
        api: WatchApi,
        watched: WatchedResource,
        namespace: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched = watched
        self.failing_since: float | None = None
        """Since when it fails, by `clock`; None: it does not fail."""
        self.problem = ""
        """Why it fails."""
        self._refused_since: float | None = None
        """When the API server first refused permission in this row of failures; None: it has not."""
        self.listed = False
        """Whether a list for it has succeeded since it was made."""
        self._status = 0
        """HTTP status of the last failure."""
        self._api = api
        self._namespace = namespace
        self._clock = clock
        self._answered = clock()
        self._version = ""
        """The resourceVersion from which to watch on; empty: list first."""
        self._failures = 0
        """In a row, until an event arrives or a watch has lasted."""
        self._unproven = False
        """Whether the API server has opened a watch that has neither lasted nor had an event yet."""
        self._expired = False
        """Whether the last resourceVersion was too old, and no event has arrived since."""

    def __str__(self) -> str:
        where = f"in namespace {self._namespace}" if self._namespace else "in all namespaces"
        return f"the watch on {self.watched.resource.plural} {where}"

    @property
    def age(self) -> float:
        """Seconds since the API server last answered it: with a list, with the begin of a watch, or with an event."""
        return self._clock() - self._answered

    @property
    def failing_for(self) -> float:
        """Seconds for which it has failed; 0 if it does not fail."""
        return 0.0 if self.failing_since is None else self._clock() - self.failing_since

    async def list(self) -> None:
        """List and record all objects; `run` then watches from that version on. KubeError: the list failed."""
        self._version = await self.watched.list(self._api, self._namespace)
        self._answered, self.listed = self._clock(), True

    async def compare(self) -> None:
        """List all objects while the watch runs, and record what it has missed. KubeError: the list failed.

        A list that is older than what the watch has seen comes from an etcd that was restored from a backup. The API
        server may deliver no event until its versions pass that of the watch, so the watch goes on from the list as
        soon as it ends, WATCH_SECONDS of `kube.client` later at most.
        """
        before = self._version
        version = await self.watched.list(self._api, self._namespace)
        if self._version == before and 0 < whole_number(version) < whole_number(before):
            log.warning("%s goes on from version %s, which is below %s: was etcd restored?", self, version, before)
            self._version = version

    async def run(self) -> None:
        """Watch until cancelled, from the last list on. Only an error in the code ends it."""
        if self.failing_since is not None:
            await self._wait()
        while True:
            try:
                if not self._version:
                    await self.list()
                await self._follow()
                continue
            except KubeError as error:
                if error.status == _GONE and not self._expired:
                    self._version, self._expired = "", True
                    continue
                self.fail(error)
            await self._wait()

    def fail(self, error: KubeError) -> None:
        """Record a failure; the first of a row is logged, and each with another HTTP status."""
        self._failures += 1
        if self.failing_since is None or error.status != self._status:
            log.warning("%s fails and is tried again until it works: %s", self, error)
        if self.failing_since is None:
            self.failing_since = self._clock()
        self.problem, self._status = str(error), error.status
        # No answer, 429 or a first 5xx says nothing about this resourceVersion: continue from it. After any other
        # error, list again.
        if error.status and error.status != _BUSY and (error.status < 500 or self._failures > 1):
            self._version = ""
        if error.status in _NO_PERMISSION:
            self._note_refusal()

    def _note_refusal(self) -> None:
        if self._refused_since is None:
            self._refused_since = self._clock()
        if not self.listed or self._clock() - self._refused_since >= MAX_WATCH_FAILURE:
            self.watched.refused()

    async def _follow(self) -> None:
        """Watch until the API server or the connection ends it. KubeError: it cannot be opened, or it fails later."""
        w, began = self.watched, self._clock()
        async with self._api.watch(w.resource, self._namespace, self._version, w.selector) as events:
            began = self._answered = self._clock()
            if not self._unproven:
                self._recover()
            self._unproven = True
            lasting = asyncio.get_running_loop().call_later(SHORT_WATCH_SECONDS, self._prove)
            try:
                await self._follow_events(events)
            finally:
                lasting.cancel()
        if self._unproven:
            seconds = self._clock() - began
            raise KubeError(f"watch {w.resource.plural}: it ended after {seconds:.1f} s without an event")

    async def _follow_events(self, events: AsyncIterator[dict[str, Any]]) -> None:
        async for event in events:
            self._answered = self._clock()
            if text(event, "type") == "ERROR":
                status = mapping(event, "object")
                raise error_from(integer(status, "code"), status, f"watch {self.watched.resource.plural}")
            self._prove()
            if text(event, "type") != "BOOKMARK":
                await self._handle(event)
            self._version = text(event, "object", "metadata", "resourceVersion") or self._version

    async def _handle(self, event: dict[str, Any]) -> None:
        try:
            await self.watched.handle(event)
        except Exception:  # it concerns this object only, and the next list compares it
            log.exception("%s: an event of %s fails", self, text(event, "object", "metadata", "name"))

    def _recover(self) -> None:
        if self.failing_since is not None:
            log.warning("%s works again after %.0f s", self, self.failing_for)
        self.failing_since, self.problem, self._refused_since = None, "", None

    def _prove(self) -> None:
        """Record that an opened watch works."""
        if self._unproven:
            self._recover()
            self._failures, self._unproven, self._expired = 0, False, False

    async def _wait(self) -> None:
        delay = doubling_delay(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, self._failures)
        await asyncio.sleep(delay * random.uniform(0.8, 1.2))  # noqa: S311  # it spreads requests, nothing more


async def _list_or_fail(watches: Iterable[Watch]) -> None:
    """List for each of these watches, one after the other. A list that fails counts as a failure of its watch."""
    for watch in watches:
        try:
            await watch.list()
        except KubeError as error:
            watch.fail(error)


class Watches:
    """All watches of an operator that leads."""

    def __init__(
        self,
        api: WatchApi,
        watched: Iterable[WatchedResource],
        namespaces: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Empty `namespaces`: all. Nodes are in none."""
        scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._watches = [
            Watch(api, what, scope, clock)
            for what in watched
            for scope in (scopes if what.resource != NODES else (None,))
        ]

    async def list_first(self) -> None:
        """List everything. A list that fails counts as a failure of its watch.

        So does one of Workloads or Nodes that has not ended FIRST_LIST_SECONDS after those of pods and jobs, because no
        job may wait for it: where Kueue's webhook is down, the API server does not answer until it has waited for that.
        """
        await _list_or_fail(watch for watch in self._watches if watch.watched.resource in _LISTED_BEFORE_WORK)
        others = [watch for watch in self._watches if watch.watched.resource not in _LISTED_BEFORE_WORK]
        # One task for each resource: many lists at once that hang would take all connections from the list of Nodes.
        resources = dict.fromkeys(watch.watched.resource for watch in others)
        listings = [asyncio.create_task(_list_or_fail(self._of(resource))) for resource in resources]
        if not listings:
            return
        try:
            done, _ = await asyncio.wait(listings, timeout=FIRST_LIST_SECONDS)
        finally:
            for listing in listings:
                listing.cancel()
        for listing in done:
            listing.result()
        for watch in others:
            if not watch.listed and watch.failing_since is None:
                plural = watch.watched.resource.plural
                watch.fail(Unclear(f"list {plural}: no answer within {FIRST_LIST_SECONDS:g} s"))

    async def compare(self) -> None:
        """List everything that is watched, and record what the watches have missed."""
        for watch in self._watches:
            if watch.failing_since is None:
                try:
                    await watch.compare()
                except KubeError as error:
                    log.warning("the list to compare with %s failed, and is tried again later: %s", watch, error)

    async def run(self) -> None:
        """Watch until cancelled. An error in the code of one of them ends all, and is raised."""
        resources = {watch.watched.resource for watch in self._watches}
        for resource in resources:
            metrics.watch_age.labels(resource.plural).set_function(partial(self._age, resource))
            metrics.failing_watches.labels(resource.plural).set_function(partial(self._failing, resource))
        tasks = [asyncio.create_task(watch.run()) for watch in self._watches]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            metrics.watch_age.clear()
            metrics.failing_watches.clear()

    def describe_blindness(self) -> str:
        """Return one sentence about a resource that could not be watched for MAX_WATCH_FAILURE in any namespace; empty
        if there is none.

        If the watches fail in some namespaces only, the operator works for the others, and the metrics show it.
        """
        for resource in dict.fromkeys(watch.watched.resource for watch in self._watches if watch.watched.needed):
            watches = self._of(resource)
            if all(watch.failing_for > MAX_WATCH_FAILURE for watch in watches):
                worst = max(watches, key=lambda watch: watch.failing_for)
                return f"{worst} has failed for {worst.failing_for:.0f} s: {worst.problem}"
        return ""

    def _of(self, resource: Resource) -> list[Watch]:
        return [watch for watch in self._watches if watch.watched.resource == resource]

    def _age(self, resource: Resource) -> float:
        return max(watch.age for watch in self._of(resource))

    def _failing(self, resource: Resource) -> float:
        return sum(watch.failing_since is not None for watch in self._of(resource))

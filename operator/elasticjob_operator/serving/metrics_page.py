"""The page of the metrics, and who may read it."""

from __future__ import annotations

import gzip
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qs

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder

from elasticjob_operator.kube import KubeError, Resource
from elasticjob_operator.kube.api import ACCESS_REVIEWS, TOKEN_REVIEWS
from elasticjob_operator.kube.limits import ConcurrencyLimit, Limit, RateLimit
from elasticjob_operator.model.cluster.raw import at, mapping, text
from elasticjob_operator.serving.http_server import Certificate, HttpRequest, HttpResponse, HttpServer

log = logging.getLogger(__name__)

PATH = "/metrics"
ALLOWED_SECONDS = 60.0
"""Seconds for which the API server is not asked again about a token that may read the metrics."""
REFUSED_SECONDS = 10.0
"""The same for a token that may not."""
_MOST_KNOWN = 256
"""Tokens about which the answer is kept."""
REVIEWS_PER_SECOND = 8.0
"""Tokens that the API server is asked about each second, because any pod may send new ones. Each costs one or two
requests, so at most a sixth of the operator's own rate. The server of this page has 64 connections and 10 s for each
answer: at this rate the tokens of all connections are reviewed within 8 s, so each request has its answer in time."""
REVIEW_BURST = 16
"""Tokens that it is asked about at once after a pause."""
_REVIEWS = 4
"""Tokens that the API server is asked about at a time; the others wait."""
_ALLOWED, _NEW = "allowed", "new"
"""Tokens wait in two groups, which take turns: one that was allowed before does not wait for all new ones."""


class ReviewApi(Protocol):
    """The call of the API server that the check of a token needs."""

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclass
class MetricsAccess:
    """Allows a user to read the metrics if the cluster's RBAC permits them to `get` the URL /metrics, as
    controller-runtime does.

    A TokenReview says whose a bearer token is, a SubjectAccessReview what they may do.
    """

    api: ReviewApi
    clock: Callable[[], float] = time.monotonic
    limit: Limit = field(default_factory=lambda: RateLimit(REVIEWS_PER_SECOND, REVIEW_BURST))
    """What the question about a token waits for."""
    _known: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    """By hash of the token: the HTTP status, and until when that answer is valid."""
    _under_way: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(_REVIEWS))

    async def status(self, request: HttpRequest) -> int:
        """Return 200 if the request may be answered, else 401 or 403; 503: the API server does not say."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return 401
        key = hashlib.sha256(token.strip().encode()).digest()
        status, until = self._known.get(key, (0, 0.0))
        if status and self.clock() < until:
            return status
        group = _ALLOWED if status == 200 else _NEW
        await self.limit.acquire(group)
        try:
            async with self._under_way.hold(group):
                status = await self._review(token.strip())
        except KubeError as error:
            log.warning("a request for the metrics is refused, because its token cannot be checked: %s", error)
            return 503
        self._remember(key, status)
        return status

    def _remember(self, key: bytes, status: int) -> None:
        """Keep an answer. If there are too many, forget the oldest refusal, and the oldest answer if there is none."""
        self._known.pop(key, None)
        if len(self._known) >= _MOST_KNOWN:
            refused = (other for other, (answer, _) in self._known.items() if answer != 200)
            del self._known[next(refused, next(iter(self._known)))]
        self._known[key] = (status, self.clock() + (ALLOWED_SECONDS if status == 200 else REFUSED_SECONDS))

    async def _review(self, token: str) -> int:
        found = await self.api.create(TOKEN_REVIEWS, "", _review_body("TokenReview", {"token": token}, TOKEN_REVIEWS))
        if at(found, "status", "authenticated") is not True:
            return 401
        user = mapping(found, "status", "user")
        who = {"user": text(user, "username"), "uid": text(user, "uid")}
        lists = {name: user[name] for name in ("groups", "extra") if name in user}
        what = {"nonResourceAttributes": {"path": PATH, "verb": "get"}}
        asked = _review_body("SubjectAccessReview", who | lists | what, ACCESS_REVIEWS)
        found = await self.api.create(ACCESS_REVIEWS, "", asked)
        return 200 if at(found, "status", "allowed") is True else 403


def _review_body(kind: str, spec: dict[str, Any], resource: Resource) -> dict[str, Any]:
    return {"apiVersion": f"{resource.group}/{resource.version}", "kind": kind, "metadata": {}, "spec": spec}


def render(request: HttpRequest, registry: CollectorRegistry = REGISTRY) -> HttpResponse:
    """Return the metrics in the format that the request accepts; `name[]` in its query selects some."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    names = parse_qs(request.query).get("name[]")
    body = encode(registry.restricted_registry(names) if names else registry)
    headers = {"Content-Type": content_type}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return HttpResponse(gzip.compress(body, 1), headers={**headers, "Content-Encoding": "gzip"})
    return HttpResponse(body, headers=headers)


def serve_metrics(port: int, access: MetricsAccess | None = None, certificate: Certificate | None = None) -> HttpServer:
    """Serve all metrics on `port` from a thread, whatever the event loop does. `access` None: to everybody.

    OSError: the port is in use.
    """

    async def page(request: HttpRequest) -> HttpResponse:
        status = 200 if access is None else await access.status(request)
        if status == 200:
            return render(request)
        challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return HttpResponse(_REFUSALS[status], status, challenge)

    return HttpServer("metrics", port, {"/": page, PATH: page}, certificate)


_REFUSALS = {
    401: b"a bearer token of a user or ServiceAccount of this cluster is required\n",
    403: b"the user may not get the URL /metrics: see docs/reference/metrics.md\n",
    503: b"the API server does not say whose the token is\n",
}

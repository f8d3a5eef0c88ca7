"""A small Kubernetes client for tests and the demo: raw JSON with one kubeconfig. It waits by watch.

It starts no process per request, because the job under test needs the machine's two cores.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

Json = dict[str, Any]
Objects = list[Json]

_PREFIX = {
    "elasticjobs": "/apis/elasticjob.dev/v1alpha1",
    "deployments": "/apis/apps/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "customresourcedefinitions": "/apis/apiextensions.k8s.io/v1",
    "podgroups": "/apis/scheduling.x-k8s.io/v1alpha1",
    "podgroups.scheduling.k8s.io": "/apis/scheduling.k8s.io/v1beta1",
    "workloads": "/apis/kueue.x-k8s.io/v1beta2",
    "resourceflavors": "/apis/kueue.x-k8s.io/v1beta2",
    "clusterqueues": "/apis/kueue.x-k8s.io/v1beta2",
    "localqueues": "/apis/kueue.x-k8s.io/v1beta2",
    "topologies": "/apis/kueue.x-k8s.io/v1beta2",
    "workloadpriorityclasses": "/apis/kueue.x-k8s.io/v1beta2",
    "poddisruptionbudgets": "/apis/policy/v1",
    "resourceclaims": "/apis/resource.k8s.io/v1",
    "resourceclaimtemplates": "/apis/resource.k8s.io/v1",
    "evictions": "/apis/lifecycle.k8s.io/v1alpha1",
    "priorityclasses": "/apis/scheduling.k8s.io/v1",
    "horizontalpodautoscalers": "/apis/autoscaling/v2",
    "apiservices": "/apis/apiregistration.k8s.io/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
}


class ApiError(Exception):
    """The API server refused a request. `reason` is Kubernetes' own (`NotFound`, `Invalid` ...)."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


class WaitTimeoutError(AssertionError):
    """A wait timed out. The message has the last state."""


@dataclass
class Kube:
    """Requests to one API server, as the kubeconfig's user."""

    kubeconfig: Path
    server: str = field(init=False)
    _tls: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        config = yaml.safe_load(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as chain:  # ssl loads a client certificate only from a file
            for part in ("client-certificate-data", "client-key-data"):
                chain.write(base64.b64decode(user[part]))
            chain.flush()
            self._tls.load_cert_chain(chain.name)

    def _connect(self, timeout: float | None = 30.0) -> http.client.HTTPSConnection:
        url = urlsplit(self.server)
        return http.client.HTTPSConnection(url.hostname or "", url.port, context=self._tls, timeout=timeout)

    def request(self, method: str, path: str, body: Json | None = None, content: str = "application/json") -> Json:
        """Send one request and return the answer. Raise ApiError if the server refuses it."""
        with closing(self._connect()) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": content, "Accept": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        answer: Json = json.loads(raw) if raw[:1] == b"{" else {"text": raw.decode(errors="replace")}
        if response.status >= 400:
            message = str(answer.get("message") or answer.get("text"))
            raise ApiError(response.status, str(answer.get("reason", "")), message)
        return answer

    def path(self, plural: str, namespace: str | None, name: str | None = None, sub: str = "") -> str:
        base = _PREFIX.get(plural, "/api/v1")
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{base}{scope}/{plural.partition('.')[0]}" + (f"/{name}" if name else "") + sub

    def get(self, plural: str, name: str, namespace: str | None = None) -> Json:
        return self.request("GET", self.path(plural, namespace, name))

    def find(self, plural: str, name: str, namespace: str | None = None) -> Json | None:
        """Return the object, or None if it does not exist."""
        try:
            return self.get(plural, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, plural: str, namespace: str | None = None, selector: str = "") -> Objects:
        items: Objects = self._list(plural, namespace, _selection(selector=selector))["items"]
        return items

    def _list(self, plural: str, namespace: str | None, selection: Mapping[str, str]) -> Json:
        return self.request("GET", self.path(plural, namespace) + "?" + urlencode(selection))

    def create(self, plural: str, body: Json, namespace: str | None = None, dry_run: bool = False) -> Json:
        query = "?dryRun=All&fieldValidation=Strict" if dry_run else "?fieldValidation=Strict"
        return self.request("POST", self.path(plural, namespace) + query, body)

    def patch(self, plural: str, name: str, body: Json, namespace: str | None = None, sub: str = "") -> Json:
        path = self.path(plural, namespace, name, sub)
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def delete(self, plural: str, name: str, namespace: str | None = None, grace: int | None = None) -> None:
        body: Json = {} if grace is None else {"gracePeriodSeconds": grace}
        try:
            self.request("DELETE", self.path(plural, namespace, name), body)
        except ApiError as error:
            if error.code != 404:
                raise

    def recreate_namespace(self, name: str) -> None:
        """Delete the namespace if it exists, wait until it is deleted, and create it."""
        if self.find("namespaces", name):
            self.delete("namespaces", name)
            what = f"namespace {name} is deleted"
            self.wait_list("namespaces", None, lambda found: not found, name=name, timeout=300, what=what)
        self.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def scale(self, job: str, namespace: str, replicas: int) -> None:
        """Set the replicas of a job, as `kubectl scale` does."""
        self.patch("elasticjobs", job, {"spec": {"replicas": replicas}}, namespace, "/scale")

    def watch(
        self,
        plural: str,
        namespace: str | None,
        *,
        name: str = "",
        selector: str = "",
        since: str = "",
        timeout: float,
    ) -> Iterator[tuple[str, Json]]:
        """Yield (type, object) for the existing objects and then for each change, for at most `timeout` seconds.

        `since`: the resourceVersion of a list; only the changes after it are yielded.
        """
        query = {"watch": "1", "timeoutSeconds": str(max(1, int(timeout + 1))), "allowWatchBookmarks": "false"}
        query |= _selection(name, selector) | ({"resourceVersion": since} if since else {})
        end = time.monotonic() + timeout
        with closing(self._connect(timeout)) as connection:
            connection.request("GET", self.path(plural, namespace) + "?" + urlencode(query))
            response = connection.getresponse()
            while (left := end - time.monotonic()) > 0:
                if connection.sock is not None:
                    connection.sock.settimeout(left)
                try:
                    line = response.readline()
                except TimeoutError:
                    return
                if not line:
                    return
                event = json.loads(line)
                yield event["type"], event["object"]

    def wait(
        self,
        plural: str,
        name: str,
        namespace: str | None,
        until: Callable[[Json], bool],
        *,
        timeout: float,
        what: str,
    ) -> Json:
        """Wait until `until` holds and return the object. Raise WaitTimeoutError with its last state."""
        end = time.monotonic() + timeout
        last: Json = {}
        while (left := end - time.monotonic()) > 0:
            for kind, current in self.watch(plural, namespace, name=name, timeout=left):
                last = current
                if kind != "DELETED" and until(current):
                    return current
        raise WaitTimeoutError(f"{what}: not within {timeout:g} s; last state: {_brief(last)}")

    def wait_list(
        self,
        plural: str,
        namespace: str | None,
        until: Callable[[Objects], bool],
        *,
        name: str = "",
        selector: str = "",
        timeout: float,
        what: str,
    ) -> Objects:
        """Wait until `until` holds for all objects of a kind, and return them."""
        end = time.monotonic() + timeout
        while True:
            listed = self._list(plural, namespace, _selection(name, selector))
            found: Objects = listed["items"]
            if until(found):
                return found
            left = end - time.monotonic()
            if left <= 0:
                names = ", ".join(item["metadata"]["name"] for item in found)
                raise WaitTimeoutError(f"{what}: not within {timeout:g} s; there are: {names or 'none'}")
            # From the list's version on: a change between the list and the watch is none to wait for.
            since = listed["metadata"]["resourceVersion"]
            next(self.watch(plural, namespace, name=name, selector=selector, since=since, timeout=left), None)

    def wait_gone(self, plural: str, namespace: str, selector: str, timeout: float) -> None:
        """Wait until no object with these labels exists."""
        what = f"no {plural} with the labels {selector}"
        self.wait_list(plural, namespace, lambda found: not found, selector=selector, timeout=timeout, what=what)

    def logs(self, pod: str, namespace: str, container: str = "", **query: str) -> str:
        """Return a container's log so far."""
        with closing(self.open_log(pod, namespace, container, query)) as connection:
            return connection.getresponse().read().decode(errors="replace")

    def follow(self, pod: str, namespace: str, container: str = "") -> Iterator[str]:
        """Yield a container's log lines until it ends. An RFC 3339 time stamp precedes each line.

        Raise ApiError if the API server or the kubelet refuses the log.
        """
        query = {"follow": "true", "timestamps": "true"}
        with closing(self.open_log(pod, namespace, container, query)) as connection:
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(response.status, "", response.read().decode(errors="replace"))
            while line := response.readline():
                yield line.decode(errors="replace").rstrip("\n")

    def open_log(
        self, pod: str, namespace: str, container: str, query: Mapping[str, str]
    ) -> http.client.HTTPSConnection:
        connection = self._connect(None)
        parameters = {**query, **({"container": container} if container else {})}
        connection.request("GET", self.path("pods", namespace, pod, "/log") + "?" + urlencode(parameters))
        return connection


def _selection(name: str = "", selector: str = "") -> dict[str, str]:
    """Return the query for the objects with this name and these labels."""
    by_name = {"fieldSelector": f"metadata.name={name}"} if name else {}
    return by_name | ({"labelSelector": selector} if selector else {})


def _brief(current: Json) -> str:
    status = dict(current.get("status", {}))
    return json.dumps(status or current, indent=1, default=str)[:4000]


def condition(job: Json, kind: str) -> Json:
    """Return a condition of a job, or `{}` if the job has none of this type."""
    conditions = job.get("status", {}).get("conditions") or ()  # a new CustomResourceDefinition has null
    found = (c for c in conditions if c["type"] == kind)
    return next(found, {})


def is_true(job: Json, kind: str) -> bool:
    return bool(condition(job, kind).get("status") == "True")

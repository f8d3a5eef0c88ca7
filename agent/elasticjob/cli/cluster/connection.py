"""Connect to a cluster as kubectl does: the kubeconfig, its contexts and namespaces, or a pod's service account.

The official client gives authentication, TLS and transport. Objects stay JSON, and each error becomes one sentence.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticjob.cli.cluster.errors import ClusterError, FlagError, NotReachableError, error_of_response
from elasticjob.cli.cluster.resources import POD_LIST, ApiResource, KubeObject, KubeObjects

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Seconds without a byte after which a request fails; a stream that follows has no limit."""
PAGE = 500
"""Objects in one response to a list."""
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MERGE_PATCH = "application/merge-patch+json"


def connect_to_cluster(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
    """Return the cluster that these flags choose; None: as kubectl chooses without the flag.

    No request is sent. FlagError: there is no such file or context. NotReachableError: there is no kubeconfig without
    these flags, it cannot be read, or the client is missing.
    """
    try:
        from kubernetes import client, config
        from kubernetes.config import ConfigException
    except ImportError:
        raise NotReachableError("the Kubernetes client is missing: pip install kubernetes") from None
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)  # its exceptions, and so our sentences, say the same
    settings = client.Configuration()
    settings.retries = False
    if kubeconfig and not any(Path(file).is_file() for file in kubeconfig.split(os.pathsep)):
        raise FlagError(f"--kubeconfig {kubeconfig}: there is no such file")
    path = kubeconfig or os.environ.get("KUBECONFIG") or None
    try:
        if not (path or context) and not _home_config().exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
            own = _IN_POD.read_text().strip()
        else:
            with _quiet_root_logger():
                own = _load_kubeconfig(config, settings, path, context)
    except (ConfigException, OSError, ValueError) as error:
        where = path or str(_home_config())
        raise NotReachableError(f"{where}: {' '.join(str(error).split())}; see --kubeconfig and --context") from None
    return Cluster(client, client.ApiClient(settings), namespace or own or "default")


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """The client logs with the root logger what its exceptions have as well."""
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


def _home_config() -> Path:
    return Path("~/.kube/config").expanduser()


def _load_kubeconfig(config: Any, settings: Any, path: str | None, context: str | None) -> str:
    """Load the kubeconfig into `settings` and return the namespace of the context."""
    where = path or str(_home_config())
    contexts, active = config.list_kube_config_contexts(config_file=where)
    chosen = next((c for c in contexts if c["name"] == context), None) if context else active
    if chosen is None:
        names = ", ".join(c["name"] for c in contexts)
        raise FlagError(f"--context {context}: {where} has no such context, only {names}")
    config.load_kube_config(config_file=where, context=chosen["name"], client_configuration=settings)
    return str(chosen["context"].get("namespace") or "")


class Cluster:
    """Requests to one API server in one namespace. Each method raises a ClusterError if its request fails.

    Methods may be called in several threads.
    """

    def __init__(self, client: Any, api: Any, namespace: str) -> None:
        self._client = client
        self._api = api
        self.namespace = namespace

    @property
    def server(self) -> str:
        return str(self._api.configuration.host)

    def in_namespace(self, namespace: str) -> Cluster:
        """Return the same connection for requests in another namespace."""
        return Cluster(self._client, self._api, namespace)

    def get(self, resource: ApiResource, name: str, subresource: str = "") -> KubeObject:
        what = f"get {resource.plural} {name}"
        return self._json("GET", resource.url(self.namespace, name, subresource), what)

    def list(
        self, resource: ApiResource, selector: str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> KubeObjects:
        """Return the objects that match both selectors."""
        return self.list_with_version(resource, selector, fields, all_namespaces=all_namespaces)[0]

    def list_with_version(
        self, resource: ApiResource, selector: str = "", fields: str = "", *, all_namespaces: bool = False
    ) -> tuple[KubeObjects, str]:
        """Return the objects, and the resourceVersion from which a watch goes on."""
        query = {"limit": str(PAGE), "labelSelector": selector, "fieldSelector": fields}
        namespace = "" if all_namespaces else self.namespace
        found: KubeObjects = []
        while True:
            answer = self._json("GET", resource.url(namespace), f"list {resource.plural}", query=query)
            found += answer.get("items") or []
            query["continue"] = answer.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return found, str(answer.get("metadata", {}).get("resourceVersion", ""))

    def watch(
        self, resource: ApiResource, selector: str = "", fields: str = "", *, version: str = "", seconds: float = 300.0
    ) -> Iterator[tuple[str, KubeObject]]:
        """Yield (type, object) for each change after `version`, for at most so many seconds.

        RefusedError with the status 410: `version` is too old, list again.
        """
        query = {
            "watch": "1", "labelSelector": selector, "fieldSelector": fields, "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(seconds))),
        }  # fmt: skip
        what = f"watch {resource.plural}"
        for line in self._lines(resource.url(self.namespace), query, what, seconds + READ_SECONDS):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise error_of_response(int(event["object"].get("code", 500)), line, what)
            yield event["type"], event["object"]

    def patch(self, resource: ApiResource, name: str, body: Mapping[str, Any], subresource: str = "") -> KubeObject:
        """Merge `body` into the object."""
        path, what = resource.url(self.namespace, name, subresource), f"patch {resource.plural} {name}"
        return self._json("PATCH", path, what, body=body)

    def create(
        self, resource: ApiResource, body: Mapping[str, Any], name: str = "", subresource: str = "", *,
        dry_run: bool = False,
    ) -> KubeObject:  # fmt: skip
        """Create an object, or the subresource of one. `dry_run`: the API server checks it and keeps nothing."""
        query = {"fieldValidation": "Strict", "dryRun": "All" if dry_run else ""}
        what = f"create {resource.plural}{'/' if subresource else ''}{subresource} {name}".rstrip()
        return self._json("POST", resource.url(self.namespace, name, subresource), what, query=query, body=body)

    def delete(self, resource: ApiResource, name: str) -> None:
        self._json("DELETE", resource.url(self.namespace, name), f"delete {resource.plural} {name}", body={})

    def log_lines(
        self, pod: str, container: str, *, follow: bool = False, tail: int | None = None, since: str = ""
    ) -> Iterator[tuple[str, str]]:
        """Yield (time, line) of a container's log. `tail`: only the last lines; `since`: RFC 3339, only newer ones."""
        query = {
            "container": container, "timestamps": "true", "follow": "true" if follow else "",
            "tailLines": "" if tail is None else str(tail), "sinceTime": since,
        }  # fmt: skip
        path = POD_LIST.url(self.namespace, pod, "log")
        for line in self._lines(path, query, f"read the log of pod {pod}", None if follow else READ_SECONDS):
            time, _, text = line.decode(errors="replace").partition(" ")
            yield time, text

    def execute(self, pod: str, container: str, command: Sequence[str], *, seconds: float = 60.0) -> str:
        """Run a command in a container and return what it writes to its standard output and error."""
        from kubernetes.stream import ws_client

        words = [("command", word) for word in command]
        pairs = [("container", container), *words, ("stdout", "true"), ("stderr", "true")]
        path = POD_LIST.url(self.namespace, pod, "exec")
        _, url, headers, _, _ = self._api.param_serialize(
            "GET", path, query_params=pairs, auth_settings=["BearerToken"]
        )
        try:
            answer = ws_client.websocket_call(
                self._api.configuration, "GET", url, headers=headers, _request_timeout=seconds
            )
        except self._client.ApiException as error:
            reason = " ".join(str(error.reason or error).split())
            if "403" in reason:
                raise error_of_response(
                    403, b"ask for the verb create on pods/exec", f"run a command in pod {pod}"
                ) from None
            raise ClusterError(f"pod {pod}: the command could not be run: {reason.split(' -+-+- ')[0]}") from None
        return str(answer.data)

    def _json(
        self, method: str, path: str, what: str, *, query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> KubeObject:  # fmt: skip
        response = self._send(method, path, what, query or {}, body, (CONNECT_SECONDS, READ_SECONDS))
        with _reading(what):
            data = response.read()
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NotReachableError(f"{what}: {self.server} answers, but not as a Kubernetes API server does")
        return answer

    def _lines(self, path: str, query: Mapping[str, str], what: str, seconds: float | None) -> Iterator[bytes]:
        response = self._send("GET", path, what, query, None, (CONNECT_SECONDS, seconds))
        rest = b""
        with contextlib.closing(response.response), _reading(what):
            for data in response.response.stream(1 << 16, decode_content=True):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line for line in lines if line)
        if rest:
            yield rest

    def _send(
        self, method: str, path: str, what: str, query: Mapping[str, str], body: Any,
        timeout: tuple[float, float | None],
    ) -> Any:  # fmt: skip
        """Send one request and return the response, whose content is not read yet."""
        from urllib3.exceptions import HTTPError

        content = _MERGE_PATCH if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": content, "User-Agent": "elasticjob"}
        pairs = [(name, value) for name, value in query.items() if value]
        _, url, headers, _, _ = self._api.param_serialize(
            method, path, query_params=pairs, header_params=headers, auth_settings=["BearerToken"]
        )
        try:
            response = self._api.rest_client.request(method, url, headers=headers, body=body, _request_timeout=timeout)
        except (HTTPError, OSError, self._client.ApiException) as error:
            raise NotReachableError(f"{self.server} does not answer: {_cause(error)}") from None
        if response.status >= 400:
            with _reading(what):
                raise error_of_response(response.status, response.read(), what)
        return response


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn an error of the connection, while a response is read, into a sentence."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (HTTPError, OSError) as error:
        raise NotReachableError(f"{what}: the connection broke off: {_cause(error)}") from None


def _cause(error: BaseException) -> str:
    """Return the innermost reason, such as `Connection refused`, without the objects that urllib3 shows."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _cause(reason)
    inner = error.__cause__ or error.__context__
    if isinstance(inner, OSError) and not isinstance(error, ssl.SSLError):
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(reason or error).split())
    return text.rpartition(">: ")[2].rpartition("): ")[2] or type(error).__name__

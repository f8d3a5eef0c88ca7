"""An API server of plain HTTP with fixed objects, for tests of the command line: all above HTTP is the real program."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
NAMESPACE = "team"
JOBS = f"/apis/elasticjob.dev/v1alpha1/namespaces/{NAMESPACE}/elasticjobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


@dataclass
class FakeApi:
    """What the server has, and what it was asked. Paths are without the query."""

    kubeconfig: Path
    lists: dict[str, list[Json]] = field(default_factory=dict)
    """Objects by the path of their list; each is served below it by its name too."""
    logs: dict[str, list[str]] = field(default_factory=dict)
    """Log lines by pod, each with its time."""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """HTTP status and message for requests whose path begins so."""
    watches: dict[str, list[Json]] = field(default_factory=dict)
    """Events of a watch on the path of a list; the watch then ends."""
    outputs: dict[str, str] = field(default_factory=dict)
    """What a command in a pod writes, by pod; no command may run in the others."""
    creates: bool = False
    """Whether an object that is created is kept in its list; 409 if its name is taken."""
    created_status: Json = field(default_factory=dict)
    """Status of a created object."""
    requests: list[tuple[str, str, Json | None]] = field(default_factory=list)
    """Method, path with query, and body."""

    def changes(self) -> list[tuple[str, str, Json | None]]:
        """Return the requests that change something."""
        return [request for request in self.requests if request[0] != "GET"]

    def answer(self, method: str, url: str, body: Json | None) -> tuple[int, str]:
        """Return HTTP status and text."""
        self.requests.append((method, url, body))
        path, query = urlsplit(url).path, {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()}
        for prefix, (status, message) in self.refused.items():
            if path.startswith(prefix):
                return status, json.dumps({"kind": "Status", "message": message, "code": status})
        parent, _, name = path.rpartition("/")
        if name == "log":
            pod = parent.rpartition("/")[2]
            lines = self.logs.get(pod, [])
            tail = query.get("tailLines")
            return 200, "".join(line + "\n" for line in (lines[-int(tail) :] if tail else lines))
        if self.creates and method == "POST" and path in self.lists and body:
            return self.create(path, body)
        if path in self.lists:
            if query.get("watch"):
                return 200, "".join(json.dumps(event) + "\n" for event in self.watches.pop(path, []))
            items = [item for item in self.lists[path] if matches(item, query.get("labelSelector", ""))]
            return 200, json.dumps({"items": items, "metadata": {"resourceVersion": "7"}})
        for owner in (path, parent):
            folder, _, wanted = owner.rpartition("/")
            for item in self.lists.get(folder, []):
                if item["metadata"]["name"] == wanted:
                    if self.creates and method == "DELETE" and owner == path:
                        self.lists[folder].remove(item)
                        return 200, json.dumps(item)
                    return 200, json.dumps(merged(item, body or {}) if method == "PATCH" else item)
        message = f'elasticjobs.elasticjob.dev "{name}" not found'
        return 404, json.dumps({"kind": "Status", "message": message, "code": 404, "details": {"name": name}})

    def create(self, path: str, body: Json) -> tuple[int, str]:
        """Keep an object, and answer as to its creation."""
        name = body["metadata"]["name"]
        if any(item["metadata"]["name"] == name for item in self.lists[path]):
            return 409, json.dumps({"kind": "Status", "message": f"{name} already exists", "code": 409})
        metadata = {"namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1", **body["metadata"]}
        self.lists[path].append({**body, "metadata": metadata, "status": self.created_status})
        return 201, json.dumps(self.lists[path][-1])


def matches(item: Json, selector: str) -> bool:
    """Return whether the labels of an object match a selector of equalities."""
    labels = item["metadata"].get("labels", {})
    pairs = [part.split("=", 1) for part in selector.split(",") if part]
    return all(labels.get(key) == value for key, value in pairs)


def merged(item: Json, patch: Json) -> Json:
    """Return an object after a merge patch."""
    result = dict(item)
    for key, value in patch.items():
        result[key] = merged(item.get(key, {}), value) if isinstance(value, dict) else value
    return result


@contextmanager
def fake_api(folder: Path, token: str = "") -> Iterator[FakeApi]:
    """Serve a FakeApi on a free port of loopback; its kubeconfig has a context `here` in NAMESPACE."""
    api = FakeApi(folder / "kubeconfig", {JOBS: [], PODS: [], EVENTS: []})

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if self.headers.get("Upgrade") == "websocket":
                self.execute()
                return
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, text = api.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def execute(self) -> None:
            """Answer a command in a pod by frames of the protocol v4.channel.k8s.io."""
            api.requests.append((self.command, self.path, None))
            pod = urlsplit(self.path).path.split("/")[-2]
            if pod not in api.outputs:
                self.send_error(403, "Forbidden")
                return
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode(), usedforsecurity=False).digest()).decode()
            self.send_response(101)
            for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept),
                                ("Sec-WebSocket-Protocol", "v4.channel.k8s.io")):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            for channel, text in ((1, api.outputs[pod]), (3, '{"status": "Success"}')):
                payload = bytes([channel]) + text.encode()
                self.wfile.write(b"\x82\x7e" + struct.pack("!H", len(payload)) + payload)
            self.wfile.write(b"\x88\x00")
            self.close_connection = True

        do_GET = do_PATCH = do_POST = do_DELETE = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    write_kubeconfig(api.kubeconfig, f"http://127.0.0.1:{server.server_address[1]}", token)
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_kubeconfig(path: Path, server: str, token: str, namespace: str = NAMESPACE, authority: str = "") -> None:
    """Write a kubeconfig with the contexts `here`, the current one, and `other` in namespace `elsewhere`.

    `authority`: file of the certificate with which the server's is signed.
    """
    cluster = {"server": server} | ({"certificate-authority": authority} if authority else {})
    contexts = [
        {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}},
        {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "elsewhere"}},
    ]
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "contexts": contexts,
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token or "t"}}],
    }  # fmt: skip
    path.write_text(json.dumps(config))

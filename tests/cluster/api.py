"""A minimal Kubernetes client for starting a cluster: one request at a time, standard library only."""

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layout import API_PORT, CONTROL_ADDRESS

STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Api:
    """The API server, with the admin's certificate. `pki` is the folder of certificates."""

    pki: Path

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, content: str = "application/json"
    ) -> Any:
        """Send one request and return the decoded response; ApiError from status 400 on, OSError without a response."""
        context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        connection = http.client.HTTPSConnection(CONTROL_ADDRESS, API_PORT, timeout=10, context=context)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": content, "Accept": "application/json"})
            response = connection.getresponse()
            answer = response.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(response.status, answer[:500])
        return json.loads(answer) if answer.startswith(("{", "[")) else answer

    def problem(self, path: str) -> str | None:
        """Return None when a GET of `path` succeeds, else the error. For `waiting.until`."""
        try:
            self.request("GET", path)
        except (ApiError, OSError) as error:
            return str(error)
        return None

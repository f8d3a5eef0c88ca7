"""Control link keys of jobs, derived from the operator's master key: a restarted operator derives the same keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from elasticjob_operator.kube import SECRETS, AlreadyExists, KubeApi, NotFound
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.model.raw import text

_DATA_KEY = "key"
_LENGTH = 32


@dataclass(frozen=True)
class JobKeys:
    """Derives one key per role, job and execution attempt: HMAC-SHA256(master, role|uid|attempt)."""

    master: bytes

    def derive(self, role: str, uid: str, attempt: int) -> bytes:
        """Return the 32-byte key of a role; `uid` is the job's."""
        return hmac.digest(self.master, f"{role}|{uid}|{attempt}".encode(), hashlib.sha256)

    def of_job(self, uid: str, attempt: int) -> dict[str, str]:
        """Return both keys of an execution attempt in hexadecimal, by data key of the job's Secret."""
        return {role: self.derive(role, uid, attempt).hex() for role in (NODE_KEY, OPERATOR_KEY)}


async def load_keys(api: KubeApi, namespace: str, name: str) -> JobKeys:
    """Read the master key from Secret `name`, created where it is missing; ValueError where its key is unusable."""
    try:
        found = await api.get(SECRETS, namespace, name)
    except NotFound:
        found = await _create(api, namespace, name)
    try:
        master = base64.b64decode(text(found, "data", _DATA_KEY), validate=True)
    except ValueError:
        master = b""
    if len(master) < 16:
        raise ValueError(f"Secret {namespace}/{name} must hold at least 16 bytes under `data.{_DATA_KEY}`")
    return JobKeys(master)


async def _create(api: KubeApi, namespace: str, name: str) -> dict[str, object]:
    key = base64.b64encode(secrets.token_bytes(_LENGTH)).decode()
    labels = {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/component": "operator"}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "type": "Opaque",
        "immutable": True,
        "data": {_DATA_KEY: key},
    }
    try:
        return await api.create(SECRETS, namespace, secret)
    except AlreadyExists:
        # Another replica has created the Secret meanwhile: all replicas must use that key.
        return await api.get(SECRETS, namespace, name)

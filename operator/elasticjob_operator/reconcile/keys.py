"""Control link keys of jobs, derived from the operator's master key: a restarted operator derives the same keys.

So the operator never reads the Secret of a job, and needs no permission to read Secrets but its own. The name of a
job's Secret ends with a key id, which only the holder of the master key can compute before the Secret exists: an object
that already has the name was made by an operator, and holds the keys that the id stands for.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from elasticjob_operator.kube import SECRETS, AlreadyExists, KubeApi, NotFound
from elasticjob_operator.manifests.services import NODE_KEY, OPERATOR_KEY
from elasticjob_operator.model.cluster.raw import Raw, text

_DATA_KEY = "key"
_PREVIOUS_DATA_KEY = "previous"
_LENGTH = 32
"""Bytes of a master key that the operator makes."""
_SHORTEST = 16
"""The fewest bytes that are accepted of a master key that an administrator makes."""
_ID_ROLE = "id"
_ID_DIGITS = 16


@dataclass(frozen=True)
class JobKeys:
    """Derives one key per role, job and execution attempt: HMAC-SHA256(master, role|uid|attempt)."""

    master: bytes
    previous: bytes = b""
    """The master key before this one: executions that began under it keep their keys. Empty if there is none."""

    def derive(self, role: str, uid: str, attempt: int) -> bytes:
        """Return the 32-byte key of a role; `uid` is the job's."""
        return hmac.digest(self.master, f"{role}|{uid}|{attempt}".encode(), hashlib.sha256)

    def of_job(self, uid: str, attempt: int) -> dict[str, str]:
        """Return both keys of an execution attempt in hexadecimal, by data key of the job's Secret."""
        return {role: self.derive(role, uid, attempt).hex() for role in (NODE_KEY, OPERATOR_KEY)}

    def key_id(self, uid: str, attempt: int) -> str:
        """Return the id of an execution attempt's keys: `status.keyId`, and the end of its Secret's name."""
        return f"{attempt}-{self.derive(_ID_ROLE, uid, attempt).hex()[:_ID_DIGITS]}"

    def of_key_id(self, uid: str, attempt: int, key_id: str) -> JobKeys | None:
        """Return the keys that this id stands for, and the present ones without an id.

        None: the id is of a master key that this operator does not have.
        """
        known = [JobKeys(master) for master in (self.master, self.previous) if master]
        return next((keys for keys in known if key_id in ("", keys.key_id(uid, attempt))), None)


async def load_keys(api: KubeApi, namespace: str, name: str) -> JobKeys:
    """Read the master key, and the previous one if there is one, from Secret `name`, created where it is missing.

    ValueError: a key in it is unusable.
    """
    try:
        found = await api.get(SECRETS, namespace, name)
    except NotFound:
        found = await _create(api, namespace, name)
    master, previous = _read(found, _DATA_KEY), _read(found, _PREVIOUS_DATA_KEY)
    wrong = _DATA_KEY if len(master) < _SHORTEST else _PREVIOUS_DATA_KEY if 0 < len(previous) < _SHORTEST else ""
    if wrong:
        raise ValueError(f"Secret {namespace}/{name} must hold at least {_SHORTEST} bytes under `data.{wrong}`")
    return JobKeys(master, previous)


def _read(secret: Raw, data_key: str) -> bytes:
    """Return a key of the Secret; empty if it is absent. One that is not base64 is as unusable as one that is short."""
    written = text(secret, "data", data_key)
    try:
        return base64.b64decode(written, validate=True)
    except ValueError:
        return written[:1].encode()  # one byte: the length check refuses it


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

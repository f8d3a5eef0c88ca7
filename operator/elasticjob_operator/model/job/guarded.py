"""What may change only while the job is suspended: fields of the spec, as one digest for each execution, and the queue.

The API server compares the old object with the new one at each write. So it permits that two quick writes suspend the
job, change it and resume it: an operator that sees only the last one must find the change by itself.

The digest must be the same after an upgrade that adds defaults to these fields: the API server then adds them to every
job that it returns. So values that equal a default are left out, at whatever time they came in
(`tests/unit/operator/test_guarded.py` holds the defaults to the definition's).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from elasticjob_operator.model.cluster.raw import Raw, integer, mapping, text

_DEFAULTS: Raw = {
    "template": {},
    "rendezvous": {
        "backend": "elasticjob", "port": 29400, "joinTimeoutSeconds": 600, "lastCallTimeoutSeconds": 30,
        "keepAliveIntervalSeconds": 1, "keepAliveMaxAttempts": 3,
    },
    "preload": ["torch", "torch._dynamo"],
    "gang": {"provider": "None"},
    "successPolicy": "All",
    "placement": "None",
    "networkIsolation": True,
}  # fmt: skip
"""The guarded fields with what the definition, or the operator, adds where they are absent."""
_TEMPLATE_DEFAULTS = {"protocol": "TCP", "name": ""}
"""Defaults of Kubernetes' own schema of a pod, at whatever depth."""
GUARDED_FIELDS = tuple(_DEFAULTS)
_VERSION = "1"
"""Of the way in which the digest is made. Digests of two versions are not compared."""


@dataclass(frozen=True)
class GuardedFields:
    """The guarded fields from which the pods of an execution are made."""

    execution: int
    digest: str
    queue: str = ""
    """The queue that admitted the execution; empty without one, or if an older operator wrote the status."""

    @property
    def comparable(self) -> bool:
        """Whether this operator makes digests in the same way."""
        return self.digest.startswith(f"{_VERSION}:")


def guarded_digest(spec: Raw) -> str:
    """Return the digest of a spec's guarded fields."""
    found = {name: _without_defaults(name, spec.get(name)) for name in GUARDED_FIELDS}
    return digest_of({name: value for name, value in found.items() if value not in (None, {})})


def template_digest(template: Raw) -> str:
    """Return the digest of a pod template."""
    return digest_of(_without_template_defaults(template))


def digest_of(value: Any) -> str:
    """Return the digest of a value as JSON."""
    written = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return f"{_VERSION}:{hashlib.sha256(written.encode(errors='replace')).hexdigest()[:32]}"


def parse_guarded(status: Raw) -> GuardedFields | None:
    """Return what a status says; None if an older operator wrote it."""
    raw = mapping(status, "guardedFields")
    digest = text(raw, "digest")
    return GuardedFields(integer(raw, "execution"), digest, text(raw, "queue")) if digest else None


def _without_defaults(name: str, value: Any) -> Any:
    default = _DEFAULTS[name]
    if name == "template":
        return _without_template_defaults(value)
    if isinstance(default, dict) and isinstance(value, dict):
        if str(value.get("provider", "")).lower() == "none":  # two spellings
            value = {**value, "provider": "None"}
        return {key: item for key, item in value.items() if item is not None and item != default.get(key)}
    return None if value == default else value


def _without_template_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        items = ((key, _without_template_defaults(item)) for key, item in value.items())
        return {
            k: v for k, v in items if v is not None and not (k in _TEMPLATE_DEFAULTS and v == _TEMPLATE_DEFAULTS[k])
        }
    return [_without_template_defaults(item) for item in value] if isinstance(value, list) else value

"""The bill of materials: what the image and the command line install, from their locks, in CycloneDX's JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from release.source import Source

LOCKS = {"operator": "the image", "cli": "the command line"}
"""Locks in the folder `requirements`, by the extra that they lock; what installs them."""
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; (.*?))? \\\n((?:    --hash=\S+(?: \\)?\n?)+)", re.MULTILINE)


def pins(lock: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield name, version, condition (empty: always) and SHA-256 of the files of each package of a lock."""
    for name, version, condition, hashes in _PIN.findall(lock):
        yield name, version, condition, re.findall(r"sha256:([0-9a-f]{64})", hashes)


def component(name: str, version: str, condition: str, hashes: list[str], extras: list[str]) -> dict[str, Any]:
    """Return a component. Its hashes are references to its files: each platform installs one of them."""
    purl = f"pkg:pypi/{name}@{version}"
    properties = [{"name": "elasticjob:extra", "value": extra} for extra in extras]
    if condition:
        properties.append({"name": "elasticjob:condition", "value": condition})
    hashed = [{"alg": "SHA-256", "content": content} for content in hashes]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "externalReferences": [
            {"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/", "hashes": hashed}
        ],
        "properties": properties,
    }


def build_bill(source: Source, dist: Path) -> Path:
    """Write the bill of materials of both locks."""
    locked: dict[tuple[str, str], tuple[str, list[str], list[str]]] = {}
    for extra in LOCKS:
        for name, version, condition, hashes in pins((source.folder / f"requirements/{extra}.lock").read_text()):
            _, _, extras = locked.setdefault((name, version), (condition, hashes, []))
            extras.append(extra)
    own = f"pkg:pypi/elasticjob@{source.version}"
    parts = [component(*key, condition, hashes, extras) for key, (condition, hashes, extras) in sorted(locked.items())]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{own}#{source.commit}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(source.epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "elasticjob",
                "version": source.version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    path = dist / f"elasticjob-{source.version}.cdx.json"
    path.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    return path

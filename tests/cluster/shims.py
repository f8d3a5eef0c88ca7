"""Sockets of containerd's shims: they lie in one folder for the whole machine, and a killed shim leaves its own."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SOCKETS = Path("/run/containerd/s")


def sockets(home: Path) -> list[Path]:
    """Those of the node whose folder is `home`: containerd names each by its own address, namespace and sandbox."""
    bundles = home.glob("run/io.containerd.runtime.v2.task/*/*")
    keys = [f"{home / 'containerd.sock'}/{bundle.parent.name}/{bundle.name}" for bundle in bundles]
    return [SOCKETS / hashlib.sha256(key.encode()).hexdigest() for key in keys]


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

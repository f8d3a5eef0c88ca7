"""Sockets of containerd's shims: all are in one machine-wide folder, and a killed shim does not remove its own."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from host import files

SOCKETS = Path("/run/containerd/s")


def sockets(home: Path) -> list[Path]:
    """Return the shim sockets of the node with folder `home`.

    containerd names a socket by the hash of its own address, the namespace and the sandbox.
    """
    tasks = files.children(home / "run/io.containerd.runtime.v2.task")
    bundles = (bundle for namespace in tasks for bundle in files.children(namespace))
    keys = [f"{home / 'containerd.sock'}/{bundle.parent.name}/{bundle.name}" for bundle in bundles]
    return [SOCKETS / hashlib.sha256(key.encode()).hexdigest() for key in keys]


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

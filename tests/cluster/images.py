"""Bringing an image archive to every node."""

import json
import subprocess
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import say
from .errors import ClusterError
from .node import Machine

NAME_KEYS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True)
class Image:
    """An image in an archive: its name as the kubelet looks for it, and its manifest's digest."""

    name: str
    digest: str


def read_archive(archive: Path) -> list[Image]:
    """Images of an OCI archive (also `docker save` since version 25); ClusterError when it is none."""
    try:
        with tarfile.open(archive) as content:
            member = content.extractfile("index.json")
            assert member is not None
            index: dict[str, Any] = json.load(member)
    except (OSError, KeyError, tarfile.TarError, ValueError) as error:
        raise ClusterError(f"{archive} is not an OCI image archive: {error}") from error
    images = [Image(full_name(name), entry["digest"]) for entry in index["manifests"] if (name := entry_name(entry))]
    if not images:
        raise ClusterError(f"{archive} names no image: its index.json has no annotation {NAME_KEYS[0]}")
    return images


def entry_name(entry: dict[str, Any]) -> str | None:
    annotations = entry.get("annotations", {})
    return next((annotations[key] for key in NAME_KEYS if key in annotations), None)


def full_name(name: str) -> str:
    """`app:1` → `docker.io/library/app:1`, as Kubernetes reads an image's name."""
    first, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return name if is_registry else f"docker.io/{name}"


def load(archive: Path, machines: Sequence[Machine]) -> None:
    """Imports `archive` into every node that lacks it, all nodes at once."""
    images = read_archive(archive)
    names = ", ".join(image.name for image in images)
    waiting = [machine for machine in machines if not has(machine, images)]
    if not waiting:
        return say(f"{names}: on every node already")
    say(f"{names} ({archive.stat().st_size / 1e6:.0f} MB): importing on {len(waiting)} nodes")
    with ThreadPoolExecutor(len(waiting)) as pool:
        list(pool.map(lambda machine: bring(archive, images, machine), waiting))
    return None


def has(machine: Machine, images: Sequence[Image]) -> bool:
    present = {tuple(line.split()[0:3:2]) for line in machine.ctr("images", "list").splitlines()[1:]}
    return all((image.name, image.digest) in present for image in images)


def bring(archive: Path, images: Sequence[Image], machine: Machine) -> None:
    """Imports into one node."""
    began = time.monotonic()
    try:
        machine.ctr("images", "import", str(archive))
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"{machine.node.name} cannot import {archive}: {error.stderr.strip()}") from error
    say(f"{time.monotonic() - began:5.1f} s  {machine.node.name}")

"""Read manifests and configurations from OCI image archives, without unpacking layers."""

import hashlib
import json
import platform
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .pause import ARCHITECTURES, encode, tar

NAME_KEYS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True)
class Image:
    """An image in an archive: its manifests and configuration, without its layers."""

    archive_name: str
    """Its name in the archive."""
    descriptor: dict[str, Any]
    """Media type, digest and size of its manifest, or of its index of platforms."""
    blobs: dict[str, bytes]
    """Its manifests and configuration by digest."""
    chain: tuple[str, ...]
    """Chain ids, containerd's names of unpacked layers, lowest first. Each id covers all layers up to its own."""

    @property
    def name(self) -> str:
        """Its full name, by which the kubelet requests it."""
        return full_name(self.archive_name)

    @property
    def digest(self) -> str:
        return str(self.descriptor["digest"])

    def without_layers(self) -> bytes:
        """Return an archive without the layers, for a node that has them unpacked."""
        entry = {**self.descriptor, "annotations": {NAME_KEYS[0]: self.name}}
        files = {"oci-layout": encode({"imageLayoutVersion": "1.0.0"})}
        files["index.json"] = encode({"schemaVersion": 2, "manifests": [entry]})
        return tar(files | {blob_path(digest): blob for digest, blob in self.blobs.items()})


def read_archive(archive: Path) -> list[Image]:
    """Return the images of an OCI archive (`docker save` writes one since version 25); ClusterError for other files."""
    try:
        with tarfile.open(archive, "r:") as content:
            entries = json.loads(member(content, "index.json"))["manifests"]
            named = [(name, entry) for entry in entries if (name := entry_name(entry))]
            images = [read_image(content, name, entry) for name, entry in named]
    except (OSError, KeyError, tarfile.TarError, ValueError) as error:
        raise ClusterError(f"{archive} is not an OCI image archive: {error}") from error
    if not images:
        raise ClusterError(f"{archive} names no image: its index.json has no annotation {NAME_KEYS[0]}")
    return images


def entry_name(entry: dict[str, Any]) -> str | None:
    annotations = entry.get("annotations", {})
    return next((annotations[key] for key in NAME_KEYS if key in annotations), None)


def full_name(name: str) -> str:
    """Return the full name that Kubernetes uses for an image: `app:1` → `docker.io/library/app:1`."""
    first, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return name if is_registry else f"docker.io/{name}"


def read_image(content: tarfile.TarFile, name: str, entry: dict[str, Any]) -> Image:
    blobs: dict[str, bytes] = {}

    def load(digest: str) -> dict[str, Any]:
        blobs[digest] = member(content, blob_path(digest))
        return dict(json.loads(blobs[digest]))

    manifest = load(entry["digest"])
    while "manifests" in manifest:
        manifest = load(next(child["digest"] for child in manifest["manifests"] if matches_machine(child)))
    config = load(manifest["config"]["digest"])
    described = {key: entry[key] for key in ("mediaType", "digest", "size")}
    return Image(name, described, blobs, chain_of(config["rootfs"]["diff_ids"]))


def matches_machine(entry: dict[str, Any]) -> bool:
    machine = platform.machine()
    wanted = ARCHITECTURES.get(machine, machine)
    return bool(entry.get("platform", {}).get("architecture", wanted) == wanted)


def chain_of(layers: list[str]) -> tuple[str, ...]:
    """Return the chain ids of layers, as the OCI image specification defines them.

    The first is the first layer's digest; each further one is the digest of "<previous chain id> <layer>".
    """
    chain: list[str] = []
    for layer in layers:
        link = f"{chain[-1]} {layer}".encode() if chain else b""
        chain.append(f"sha256:{hashlib.sha256(link).hexdigest()}" if chain else layer)
    return tuple(chain)


def blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def member(content: tarfile.TarFile, path: str) -> bytes:
    file = content.extractfile(path)
    if file is None:
        raise KeyError(path)
    return file.read()

"""What is in an OCI image archive, without unpacking it."""

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
    """An image in an archive, described by all of its small parts but not its layers."""

    written: str
    """Its name in the archive."""
    descriptor: dict[str, Any]
    """Media type, digest and size of its manifest (or of its index of platforms)."""
    blobs: dict[str, bytes]
    """Its manifests and configuration by digest."""
    chain: tuple[str, ...]
    """What containerd calls the unpacked layers, lowest first: each name covers all below it."""

    @property
    def name(self) -> str:
        """Its name as the kubelet looks for it."""
        return full_name(self.written)

    @property
    def digest(self) -> str:
        return str(self.descriptor["digest"])

    def without_layers(self) -> bytes:
        """An archive of everything but the layers, for a node that has them unpacked."""
        entry = {**self.descriptor, "annotations": {NAME_KEYS[0]: self.name}}
        files = {"oci-layout": encode({"imageLayoutVersion": "1.0.0"})}
        files["index.json"] = encode({"schemaVersion": 2, "manifests": [entry]})
        return tar(files | {blob_path(digest): blob for digest, blob in self.blobs.items()})


def read_archive(archive: Path) -> list[Image]:
    """Images of an OCI archive (also `docker save` since version 25); ClusterError when it is none."""
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
    """`app:1` → `docker.io/library/app:1`, as Kubernetes reads an image's name."""
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
        manifest = load(next(child["digest"] for child in manifest["manifests"] if for_this_machine(child)))
    config = load(manifest["config"]["digest"])
    described = {key: entry[key] for key in ("mediaType", "digest", "size")}
    return Image(name, described, blobs, chain_of(config["rootfs"]["diff_ids"]))


def for_this_machine(entry: dict[str, Any]) -> bool:
    machine = platform.machine()
    wanted = ARCHITECTURES.get(machine, machine)
    return bool(entry.get("platform", {}).get("architecture", wanted) == wanted)


def chain_of(layers: list[str]) -> tuple[str, ...]:
    """Chain ids of the OCI image specification: the first layer's digest, then digests of "<chain so far> <layer>"."""
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

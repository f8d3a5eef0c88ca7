"""Write OCI image archives from layers, which are cached by a hash of their inputs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MEDIA = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer tar: its SHA-256 in hexadecimal, and its size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class Recipe:
    """How to build a layer. `inputs` must change whenever the content would; `make` writes the tar."""

    title: str
    inputs: Mapping[str, Any]
    make: Callable[[IO[bytes]], None]

    @property
    def key(self) -> str:
        return hashlib.sha256(encode(self.inputs)).hexdigest()[:32]


class Cache:
    """A folder of layers, by the keys of their recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("layers", "blobs"):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def blob(self, layer: Layer) -> Path:
        """Return the path of the layer's tar."""
        return self.folder / "blobs" / layer.digest

    def known(self, recipe: Recipe) -> Layer | None:
        """Return the layer that an earlier build of this recipe wrote; None without one."""
        entry = self.folder / "layers" / f"{recipe.key}.json"
        if not entry.exists():
            return None
        layer = Layer(**json.loads(entry.read_text()))
        return layer if self.blob(layer).exists() else None

    def layer(self, recipe: Recipe) -> Layer:
        """Return the recipe's layer, built unless the cache has it."""
        return self.known(recipe) or self._build(recipe)

    def _build(self, recipe: Recipe) -> Layer:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            try:
                writer = HashingWriter(file)
                recipe.make(writer)
                layer = Layer(writer.sha256.hexdigest(), writer.size)
                file.flush()
                Path(file.name).rename(self.blob(layer))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        replace_text(self.folder / "layers" / f"{recipe.key}.json", json.dumps(vars(layer)))
        return layer


class HashingWriter(io.BytesIO):
    """Writes through to `file`, and computes SHA-256 and size."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any, /) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self.file.write(data)


@dataclass(frozen=True)
class Image:
    """A name such as `app:1.0`, its layers from the bottom up, and the runtime `config` of the OCI specification."""

    name: str
    layers: Sequence[Layer]
    config: Mapping[str, Any]

    @property
    def documents(self) -> tuple[bytes, bytes]:
        """The image's config and manifest, as JSON."""
        machine = platform.machine()
        config = encode(
            {
                "architecture": ARCHITECTURES.get(machine, machine),
                "os": "linux",
                "config": self.config,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in self.layers]},
            }
        )
        layers = [
            {"mediaType": f"{MEDIA}.layer.v1.tar", "digest": f"sha256:{layer.digest}", "size": layer.size}
            for layer in self.layers
        ]
        manifest = encode(
            {
                "schemaVersion": 2,
                "mediaType": f"{MEDIA}.manifest.v1+json",
                "config": descriptor(f"{MEDIA}.config.v1+json", config),
                "layers": layers,
            }
        )
        return config, manifest


def write_archive(image: Image, cache: Cache, archive: Path) -> bool:
    """Write the image as an OCI archive; return False where `archive` holds it already."""
    config, manifest = image.documents
    name, tag = image.name.split(":")
    annotations = {
        "io.containerd.image.name": image.name if "/" in image.name else f"docker.io/library/{image.name}",
        "org.opencontainers.image.ref.name": tag,
        "org.opencontainers.image.title": name,
    }
    described = descriptor(f"{MEDIA}.manifest.v1+json", manifest) | {"annotations": annotations}
    index = encode({"schemaVersion": 2, "manifests": [described]})
    if archive.exists() and held_index(archive) == index:
        return False
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        # The index comes first: `held_index` reads only the first entry.
        add_file(tar, "index.json", index)
        add_file(tar, "oci-layout", encode({"imageLayoutVersion": "1.0.0"}))
        for document in (config, manifest):
            add_file(tar, f"blobs/sha256/{hashlib.sha256(document).hexdigest()}", document)
        for layer in dict.fromkeys(image.layers):
            entry = tarfile.TarInfo(f"blobs/sha256/{layer.digest}")
            entry.size, entry.mode = layer.size, 0o644
            with cache.blob(layer).open("rb") as blob:
                tar.addfile(entry, blob)
    partial.rename(archive)
    return True


def held_index(archive: Path) -> bytes | None:
    """Return index.json of an archive that `write_archive` wrote; None for other archives."""
    with tarfile.open(archive) as tar:
        first = tar.next()
        content = tar.extractfile(first) if first is not None and first.name == "index.json" else None
        return content.read() if content is not None else None


def encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def add_file(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """Add a file, owned by root and without a time: the same content gives the same layer."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def add_folder(tar: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    """Add a folder, owned by root."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def add_tree(tar: tarfile.TarFile, folder: Path, at: str) -> None:
    """Add every file and folder below `folder`, in order, under the path `at`."""
    for path in sorted(folder.rglob("*")):
        name = f"{at}/{path.relative_to(folder)}"
        if path.is_dir():
            add_folder(tar, name)
        else:
            add_file(tar, name, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)


def unpacked(cache: Cache, layer: Layer) -> Path:
    """Return the layer unpacked as a folder of the cache."""
    folder = cache.folder / "roots" / layer.digest[:32]
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with tarfile.open(cache.blob(layer)) as tar:
            tar.extractall(partial, filter="fully_trusted")  # noqa: S202  a layer of this build
        partial.rename(folder)
    return folder


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically, so that no reader sees a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)

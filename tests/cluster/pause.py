"""Write an image of one static program in one layer as an OCI archive, such as that of sandboxes."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

IMAGE = "localhost/pause:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OCI = "application/vnd.oci.image"


def write_image(program: Path, archive: Path, name: str = IMAGE, path: str = "pause") -> None:
    """Write `archive` with one image, which runs `program` as `path` below its root."""
    layer = tar({path: program.read_bytes()}, mode=0o755)
    machine = platform.machine()
    config = encode(
        {
            "architecture": ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Entrypoint": [f"/{path}"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }
    )
    manifest = encode(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": descriptor(f"{_OCI}.config.v1+json", config),
            "layers": [descriptor(f"{_OCI}.layer.v1.tar", layer)],
        }
    )
    named = {**descriptor(f"{_OCI}.manifest.v1+json", manifest), "annotations": {"io.containerd.image.name": name}}
    files = {
        "oci-layout": encode({"imageLayoutVersion": "1.0.0"}),
        "index.json": encode({"schemaVersion": 2, "manifests": [named]}),
    }
    files |= {f"blobs/sha256/{digest(blob).removeprefix('sha256:')}": blob for blob in (layer, config, manifest)}
    archive.write_bytes(tar(files))


def encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(blob), "size": len(blob)}


def tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar of `files`; the same files give the same bytes."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return output.getvalue()

"""The project's images on the test cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster import verbs
from images import build, oci


def build_all() -> list[Path]:
    """Build both images and return their archives."""
    return [build.build(name) for name in build.BUILDERS]


def build_and_load() -> None:
    """Build both images and load them on every node."""
    for archive in build_all():
        verbs.load(archive)


def renamed(name: str, image: str, folder: Path) -> Path:
    """Write an archive of one of the images under another name, such as `late:1.0`, and return its path."""
    cache = oci.Cache(build.folder())
    archive = folder / "renamed.tar"
    oci.write_archive(replace(build.BUILDERS[name](cache), name=image), cache, archive)
    return archive

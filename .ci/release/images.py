"""The image: by Docker and the Dockerfile for both architectures, else for this machine's by tests/images.

Without Docker the image of this machine's architecture has the same contract as the Dockerfile's: the programs
`elasticjob-operator` and `elasticjob` on the PATH, /opt/elasticjob/agent.pyz, user 65532. `make test` runs that one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from release.source import REPOSITORY, ReleaseError, Source

PLATFORMS = ("amd64", "arm64")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Images:
    """What was built, and what was not: a sentence for each, for people."""

    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def build_images(source: Source, dist: Path) -> Images:
    if has_buildx():
        return with_docker(source, dist)
    return without_docker(source, dist)


def has_buildx() -> bool:
    """Return whether a Docker daemon answers and has buildx."""
    for question in (["docker", "info"], ["docker", "buildx", "version"]):
        try:
            if subprocess.run(question, capture_output=True, timeout=60, check=False).returncode != 0:
                return False
        except (OSError, subprocess.TimeoutExpired):
            return False
    return True


def with_docker(source: Source, dist: Path) -> Images:
    """Build an archive with both architectures. PYTHON_IMAGE may name the base image by its digest."""
    archive = dist / f"elasticjob-image-{source.version}.tar"
    base = ["--build-arg", f"PYTHON={os.environ['PYTHON_IMAGE']}"] if "PYTHON_IMAGE" in os.environ else []
    command = [
        "docker", "buildx", "build", "--platform", ",".join(f"linux/{name}" for name in PLATFORMS), *base,
        "--provenance=false", "--tag", f"elasticjob:{source.version}",
        "--output", f"type=oci,dest={archive},rewrite-timestamp=true", str(source.folder),
    ]  # fmt: skip
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch)}
    if subprocess.run(command, env=env, check=False).returncode != 0:
        raise ReleaseError("docker buildx cannot build the image: its output is above")
    notes = [f"{archive.name} has the image for {' and '.join(PLATFORMS)}, built by the Dockerfile"]
    if not base:
        notes.append(
            "its base image is not pinned: set PYTHON_IMAGE=python@sha256:... for an image that can be rebuilt"
        )
    return Images((archive,), tuple(notes))


def without_docker(source: Source, dist: Path) -> Images:
    """Build the image of this machine's architecture with tests/images, where that is possible."""
    here = MACHINES.get(platform.machine(), platform.machine())
    missing = [name for name in PLATFORMS if name != here]
    left = f"not built: the image for {' and '.join(missing)}, which needs docker buildx: run make release where it is"
    if os.geteuid() != 0:
        return Images(notes=(f"not built: any image, which needs docker buildx, or root: {left}",))
    program = REPOSITORY / "tests/images/build.py"
    done = subprocess.run([sys.executable, str(program), "elasticjob"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError("tests/images/build.py cannot build the image: its output is above")
    archive = dist / f"elasticjob-image-{source.version}-{here}.tar"
    # A link where both are on one file system: the archive has 100 MB.
    built = Path(done.stdout.split()[-1])
    try:
        os.link(built, archive)
    except OSError:
        archive.write_bytes(built.read_bytes())
    note = f"{archive.name} has the image for {here}, built without Docker: on Debian's Python, with the same contract"
    return Images((archive,), (note, left))

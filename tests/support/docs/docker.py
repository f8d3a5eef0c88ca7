"""A stand-in for docker on the test cluster, which pulls from no registry: `push` loads the image on every node.

    docker.py build -t NAME FOLDER
    docker.py push NAME

The images of this repository are those of tests/images. Any other Dockerfile may have FROM, COPY and WORKDIR; its base
is the Debian with torch of the image elasticjob-digits.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import IO

from cluster import verbs
from images import build, oci
from images.elasticjob import REPOSITORY

ARCHIVES = "DOCKER_STAND_IN"
"""Variable with the folder of built archives."""
OURS = {"elasticjob": REPOSITORY, "elasticjob-digits": REPOSITORY / "examples/digits"}


def main(arguments: list[str]) -> int:
    match arguments:
        case ["build", "-t", name, folder]:
            built(name, Path(folder))
        case ["push", name]:
            verbs.load(archive(name))
            print(f"{name.rpartition(':')[2]}: digest: sha256:{'0' * 64} size: 1")
        case _:
            print(f"unexpected: docker {' '.join(arguments)}")
            return 64
    return 0


def archive(name: str) -> Path:
    return Path(os.environ[ARCHIVES]) / f"{hashlib.sha256(name.encode()).hexdigest()}.tar"


def built(name: str, folder: Path) -> None:
    """Write the archive of the image of a folder's Dockerfile."""
    lines = [line.split() for line in (folder / "Dockerfile").read_text().splitlines() if line.strip()]
    cache = oci.Cache(build.folder())
    ours = next(
        (image for image, place in OURS.items() if place / "Dockerfile" == (folder / "Dockerfile").resolve()), ""
    )
    image = build.BUILDERS[ours or "elasticjob-digits"](cache)
    if not ours:
        image = replace(image, layers=[image.layers[0], added(cache, folder, lines)])
        workdir = next((words[1] for words in lines if words[0] == "WORKDIR"), "/")
        image = replace(image, config={**image.config, "WorkingDir": workdir})
    oci.write_archive(replace(image, name=name), cache, archive(name))


def added(cache: oci.Cache, folder: Path, lines: list[list[str]]) -> oci.Layer:
    """Return the layer of the COPY lines."""
    files = {words[2]: (folder / words[1]).read_bytes() for words in lines if words[0] == "COPY"}

    def make(output: IO[bytes]) -> None:
        with tarfile.open(fileobj=output, mode="w|") as tar:
            for path, content in files.items():
                oci.add_folder(tar, str(Path(path).parent).lstrip("/"))
                oci.add_file(tar, path.lstrip("/"), content)

    digests = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    return cache.layer(oci.Recipe("the copied files of a Dockerfile", {"copied": digests}, make))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

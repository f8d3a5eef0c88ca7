#!/usr/bin/env python3
"""Build the images as OCI archives, without Docker, and print the path of each.

Layers are cached under .cache/images (or ELASTICJOB_CACHE/images) by a hash of their inputs, so that a build after a
change of code takes a second.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

if not __package__:  # started as a file: this folder is a package one level up
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from host.errors import SetupError
from images import digits, elasticjob, oci
from images.console import progress

BUILDERS = {"elasticjob": elasticjob.build, "elasticjob-digits": digits.build}


def folder() -> Path:
    """Return the folder of layers and archives."""
    return Path(os.environ.get("ELASTICJOB_CACHE") or elasticjob.REPOSITORY / ".cache").absolute() / "images"


def archive_of(name: str) -> Path:
    """Return the path at which `build` writes the archive of an image such as `elasticjob`."""
    return folder() / f"{name}.tar"


def build(name: str) -> Path:
    """Build an image, write its archive unless it is unchanged, and return the archive's path."""
    cache = oci.Cache(folder())
    archive = archive_of(name)
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent builds would write the same files
        image = BUILDERS[name](cache)
        changed = oci.write_archive(image, cache, archive)
    size = sum(layer.size for layer in image.layers) / 1e6
    progress(f"{image.name}: {'' if changed else 'unchanged, '}{size:.0f} MB")
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(prog="build.py", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"one of {', '.join(BUILDERS)} (default: all)")
    wanted = parser.parse_args().images or list(BUILDERS)
    if unknown := set(wanted) - BUILDERS.keys():
        parser.error(f"no such image: {', '.join(sorted(unknown))}")
    try:
        for name in wanted:
            print(build(name), flush=True)
    except SetupError as error:
        progress(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

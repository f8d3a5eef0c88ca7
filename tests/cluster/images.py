"""Load images on every node: one node unpacks them, and all nodes share the files by hard links.

An import writes an image's bytes twice, so imports on three nodes would write them six times. Instead, one node imports
and the cache keeps hard links to its unpacked layers. Every other node, also of later clusters, gets links to the same
files as its own snapshot. Nodes only read layers: containers write into a folder above them.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .archives import Image, read_archive
from .console import progress
from .errors import ClusterError
from .node import Machine

KEEP = 24 * 3600.0
"""Seconds that unpacked layers stay in the cache after their last use."""


@dataclass(frozen=True)
class Layers:
    """Unpacked layers in the cache: one folder per chain id, the layer's files below `fs`."""

    folder: Path

    def path(self, chain: str) -> Path:
        return self.folder / chain.replace(":", "-")

    def has(self, image: Image) -> bool:
        return all(self.path(chain).exists() for chain in image.chain)

    def keep(self, chain: str, unpacked: Path) -> None:
        """Add a layer that a node has unpacked, as hard links."""
        target = self.path(chain)
        if target.exists():
            return
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        link_tree(unpacked, partial / "fs")
        partial.rename(target)

    def record_use(self, images: Sequence[Image]) -> None:
        """Record the use of these images' layers, and remove layers that were not used for a day."""
        for path in {self.path(chain) for image in images for chain in image.chain}:
            path.touch()
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > KEEP:
                shutil.rmtree(path)


def link_tree(source: Path, target: Path) -> None:
    """Copy the tree `source` to `target`, with hard links where both are on one disk."""
    target.mkdir(exist_ok=True)
    for option in ("-al", "-a"):
        if subprocess.run(["cp", option, f"{source}/.", str(target)], check=False, capture_output=True).returncode == 0:
            return
    raise ClusterError(f"cannot copy {source} to {target}: is the disk full?")


def load(archive: Path, machines: Sequence[Machine], cache: Path) -> None:
    """Load the images of `archive` on every node that lacks them, on all nodes in parallel."""
    images = read_archive(archive)
    names = ", ".join(image.name for image in images)
    lacking = [machine for machine in machines if not has(machine, images)]
    if not lacking:
        return progress(f"{names}: already on every node")
    size, nodes = archive.stat().st_size / 1e6, "1 node" if len(lacking) == 1 else f"{len(lacking)} nodes"
    progress(f"{names} ({size:.0f} MB): loading on {nodes}")
    layers = Layers(cache / "layers")
    if not all(map(layers.has, images)):
        timed(lacking[0], "unpacked on", lambda: unpack(lacking[0], archive, images, layers))
    with ThreadPoolExecutor(len(lacking)) as pool:
        list(pool.map(lambda machine: timed(machine, "loaded on", lambda: share(machine, images, layers)), lacking))
    return layers.record_use(images)


def timed(machine: Machine, what: str, work: Callable[[], None]) -> None:
    """Call `work` and print its duration."""
    began = time.monotonic()
    work()
    progress(f"{time.monotonic() - began:5.1f} s  {what} {machine.node.name}")


def has(machine: Machine, images: Sequence[Image]) -> bool:
    """Return whether a node has these images, by name and digest."""
    rows = [line.split() for line in machine.ctr("images", "list").splitlines()[1:]]
    present = {(row[0], row[2]) for row in rows}
    return all((image.name, image.digest) in present for image in images)


def unpack(machine: Machine, archive: Path, images: Sequence[Image], layers: Layers) -> None:
    """Import the archive on one node, and keep the unpacked layers in the cache."""
    machine.ctr("images", "import", str(archive))
    for image in images:
        if image.archive_name != image.name:  # containerd's CRI plugin fails on a name that is not full
            machine.ctr("images", "tag", "--force", image.archive_name, image.name)
            machine.ctr("images", "remove", image.archive_name)
    for chain in dict.fromkeys(chain for image in images for chain in image.chain):
        key = f"keep-{chain}"
        # Not `view`: containerd's garbage collection may remove a view at any time.
        machine.ctr("snapshots", "prepare", key, chain)
        layers.keep(chain, folder(machine, key, r"lowerdir=([^,:\s]+)"))
        machine.ctr("snapshots", "remove", key)


def share(machine: Machine, images: Sequence[Image], layers: Layers) -> None:
    """Link the cached layers into one node's snapshots, then import the image's manifest and configuration."""
    present = {line.split()[0] for line in machine.ctr("snapshots", "list").splitlines()[1:]}
    for image in images:
        for parent, chain in zip(("", *image.chain), image.chain, strict=False):
            if chain in present:
                continue
            key = f"share-{chain}"
            machine.ctr("snapshots", "prepare", key, *filter(None, [parent]))
            # The mount command of the lowest layer has another form: it has no layer below it.
            link_tree(layers.path(chain) / "fs", folder(machine, key, r"(?:upperdir=|\s)(/[^,\s]+/snapshots/\d+/fs)"))
            machine.ctr("snapshots", "commit", chain, key)
            present.add(chain)
        machine.ctr("images", "import", "--no-unpack", "-", stdin=image.without_layers())


def folder(machine: Machine, key: str, pattern: str) -> Path:
    """Return a folder of a snapshot, which `pattern` finds in the mount command that ctr prints."""
    mount = machine.ctr("snapshots", "mounts", "/mnt", key)
    if (found := re.search(pattern, mount)) is None:
        raise ClusterError(f"containerd of {machine.node.name} mounts layers in an unexpected form: {mount.strip()}")
    return Path(found[1])

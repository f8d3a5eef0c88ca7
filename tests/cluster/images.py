"""Bringing images to every node: unpacked once, then the same files under each node.

An import writes an image's bytes twice, and three nodes would do so six times. So one node imports; its unpacked layers
are kept in the cache as hard links, and every other node, also of the next cluster, gets links to the same files as its
own snapshot. Layers are only ever read: containers write into a folder above them.
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
from .console import say
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
        """Takes links to a layer that a node has unpacked."""
        target = self.path(chain)
        if target.exists():
            return
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        link_tree(unpacked, partial / "fs")
        partial.rename(target)

    def used(self, images: Sequence[Image]) -> None:
        """Notes the use of these images' layers and drops those that nobody used for long."""
        for path in {self.path(chain) for image in images for chain in image.chain}:
            path.touch()
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > KEEP:
                shutil.rmtree(path)


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` the same tree as `source`, its files hard links where both are on one disk."""
    target.mkdir(exist_ok=True)
    for how in ("-al", "-a"):
        if subprocess.run(["cp", how, f"{source}/.", str(target)], check=False, capture_output=True).returncode == 0:
            return
    raise ClusterError(f"cannot copy {source} to {target}: is the disk full?")


def load(archive: Path, machines: Sequence[Machine], cache: Path) -> None:
    """Brings the images of `archive` to every node that lacks them, all nodes at once."""
    images = read_archive(archive)
    names = ", ".join(image.name for image in images)
    waiting = [machine for machine in machines if not has(machine, images)]
    if not waiting:
        return say(f"{names}: on every node already")
    say(f"{names} ({archive.stat().st_size / 1e6:.0f} MB): bringing it to {len(waiting)} nodes")
    layers = Layers(cache / "layers")
    if not all(map(layers.has, images)):
        timed(waiting[0], "unpacked on", lambda: unpack(waiting[0], archive, images, layers))
    with ThreadPoolExecutor(len(waiting)) as pool:
        list(pool.map(lambda machine: timed(machine, "on", lambda: share(machine, images, layers)), waiting))
    return layers.used(images)


def timed(machine: Machine, what: str, work: Callable[[], None]) -> None:
    began = time.monotonic()
    work()
    say(f"{time.monotonic() - began:5.1f} s  {what} {machine.node.name}")


def has(machine: Machine, images: Sequence[Image]) -> bool:
    rows = [line.split() for line in machine.ctr("images", "list").splitlines()[1:]]
    present = {(row[0], row[2]) for row in rows}
    return all((image.name, image.digest) in present for image in images)


def unpack(machine: Machine, archive: Path, images: Sequence[Image], layers: Layers) -> None:
    """Lets one node's containerd import the archive, and keeps what it unpacked."""
    machine.ctr("images", "import", str(archive))
    for image in images:
        if image.written != image.name:  # containerd's Kubernetes side stumbles over a name that is not full
            machine.ctr("images", "tag", "--force", image.written, image.name)
            machine.ctr("images", "remove", image.written)
    for chain in dict.fromkeys(chain for image in images for chain in image.chain):
        key = f"keep-{chain}"
        # Not `view`: containerd's garbage collection may take a view away at any time.
        machine.ctr("snapshots", "prepare", key, chain)
        layers.keep(chain, folder(machine, key, r"lowerdir=([^,:\s]+)"))
        machine.ctr("snapshots", "remove", key)


def share(machine: Machine, images: Sequence[Image], layers: Layers) -> None:
    """Gives one node the kept layers as its own snapshots, then the image's manifest and configuration."""
    present = {line.split()[0] for line in machine.ctr("snapshots", "list").splitlines()[1:]}
    for image in images:
        for parent, chain in zip(("", *image.chain), image.chain, strict=False):
            if chain in present:
                continue
            key = f"share-{chain}"
            machine.ctr("snapshots", "prepare", key, *filter(None, [parent]))
            # The lowest layer is mounted by itself, all others over it.
            link_tree(layers.path(chain) / "fs", folder(machine, key, r"(?:upperdir=|\s)(/[^,\s]+/snapshots/\d+/fs)"))
            machine.ctr("snapshots", "commit", chain, key)
            present.add(chain)
        machine.ctr("images", "import", "--no-unpack", "-", stdin=image.without_layers())


def folder(machine: Machine, key: str, pattern: str) -> Path:
    """A folder of a snapshot, found in its mount command as ctr prints it."""
    mount = machine.ctr("snapshots", "mounts", "/mnt", key)
    if (found := re.search(pattern, mount)) is None:
        raise ClusterError(f"containerd of {machine.node.name} mounts layers in an unknown way: {mount.strip()}")
    return Path(found[1])

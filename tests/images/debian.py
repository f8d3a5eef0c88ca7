"""Debian roots as layers, made by mmdebstrap, without files that containers do not need."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from host import debian_packages
from images.console import ImageError, console

SUITE = "trixie"

DOCUMENTS = (
    "usr/share/doc/*",
    "usr/share/locale/*",
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/lintian/*",
    "usr/share/bash-completion/*",
    "usr/share/zsh/*",
    "var/cache/*/*",
    "var/lib/apt/*/*",
    "var/log/*",
    "dev/*",
)
"""Patterns of files that no container needs. The container runtime provides /dev."""

KEPT = ("usr/share/doc/*/copyright",)
"""Exceptions from DOCUMENTS: licences stay in the image."""


@dataclass(frozen=True)
class Root:
    """A Debian root: a variant of mmdebstrap, further packages, path patterns to leave out, text appended to files."""

    variant: str
    packages: Sequence[str]
    dropped: Sequence[str] = ()
    appended: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, object]:
        """Everything that determines the content of the layer."""
        return {
            "suite": SUITE,
            "variant": self.variant,
            "packages": sorted(self.packages),
            "dropped": [*DOCUMENTS, *self.dropped],
            "kept": list(KEPT),
            "appended": dict(self.appended),
        }

    def make(self, layer: IO[bytes]) -> None:
        """Run mmdebstrap and write its root, without dropped files."""
        require_mmdebstrap()
        command = ["mmdebstrap", "--quiet", f"--variant={self.variant}", f"--include={','.join(self.packages)}"]
        for path, text in self.appended.items():
            command.append(f"--customize-hook=printf '{text}' >> \"$1/{path}\"")
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen([*command, SUITE, "-"], stdout=subprocess.PIPE, stderr=errors) as debootstrap:
                assert debootstrap.stdout is not None
                try:
                    copy_without(debootstrap.stdout, layer, [*DOCUMENTS, *self.dropped])
                except tarfile.TarError:
                    debootstrap.stdout.close()
            if debootstrap.returncode != 0:
                errors.seek(0)
                output = errors.read().decode(errors="replace").strip()
                raise ImageError(f"mmdebstrap failed with exit code {debootstrap.returncode}:\n{output[-4000:]}")


def copy_without(source: IO[bytes], layer: IO[bytes], dropped: Sequence[str]) -> None:
    """Copy a tar stream without entries whose path matches a pattern; `*` also matches `/`."""
    unwanted = re.compile("|".join(fnmatch.translate(pattern) for pattern in dropped))
    wanted = re.compile("|".join(fnmatch.translate(pattern) for pattern in KEPT))
    left_out: set[str] = set()
    with (
        tarfile.open(fileobj=source, mode="r|", bufsize=1 << 20) as root,
        tarfile.open(fileobj=layer, mode="w|", bufsize=1 << 20, format=tarfile.PAX_FORMAT) as kept,
    ):
        for entry in root:
            entry.name = entry.name.removeprefix("./")
            target = entry.linkname.removeprefix("./") if entry.islnk() else ""
            if (unwanted.match(entry.name) and not wanted.match(entry.name)) or target in left_out:
                left_out.add(entry.name)
                continue
            entry.linkname = target or entry.linkname
            kept.addfile(entry, root.extractfile(entry) if entry.isreg() else None)


def require_mmdebstrap() -> None:
    """Install mmdebstrap where it is missing; raise ImageError with what to do where that is not possible."""
    if os.geteuid() != 0:
        raise ImageError("building images needs root: mmdebstrap installs Debian packages into a folder")
    if shutil.which("mmdebstrap"):
        return
    if not debian_packages.has_apt():
        raise ImageError("building images needs mmdebstrap: install it, or build with Docker (see Dockerfile)")
    debian_packages.install(["mmdebstrap", "debian-archive-keyring"], console)

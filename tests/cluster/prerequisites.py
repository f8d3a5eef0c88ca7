"""Check that the machine can run a bare cluster, and install missing Debian packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from host.debian_packages import PATH, install

from . import cgroups
from .console import console
from .errors import ClusterError
from .layout import Layout

PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
"""Debian package of each program."""
CNI_PACKAGE = "containernetworking-plugins"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
CNI_PLUGINS = ("ptp", "host-local", "loopback", "portmap")
SOCKET_PATH = 107
"""Longest path of a Unix socket, in bytes."""
LONGEST_SOCKET = "node200/kubelet/device-plugins/kubelet.sock"


def check(layout: Layout) -> None:
    """Install missing Debian packages; raise ClusterError where the machine cannot run a cluster."""
    if sys.platform != "linux":
        raise ClusterError("the bare cluster needs Linux; elsewhere start Docker and put `kind` on the PATH")
    if os.geteuid() != 0:
        raise ClusterError(
            "a cluster creates network namespaces and cgroups: run as root, for instance `sudo make cluster`"
        )
    if (problem := cgroups.problem()) is not None:
        raise ClusterError(problem)
    if len(str(layout.state)) + 1 + len(LONGEST_SOCKET) > SOCKET_PATH:
        limit = SOCKET_PATH - 1 - len(LONGEST_SOCKET)
        raise ClusterError(
            f"{layout.state} is too long for Unix sockets: set ELASTICJOB_STATE to a path of <= {limit} bytes"
        )
    check_overlay(layout)
    if packages := missing_packages():
        install(packages, console)
    if packages := missing_packages():
        raise ClusterError(f"still missing after the installation: {' '.join(packages)}; install them by hand")


def check_overlay(layout: Layout) -> None:
    """Raise ClusterError where containerd cannot mount images: overlays need a kernel module, and no overlay below."""
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        subprocess.run(["modprobe", "overlay"], check=False, capture_output=True)
        if "overlay" not in Path("/proc/filesystems").read_text().split():
            raise ClusterError("this kernel has no overlay file system: load the module `overlay`")
    layout.state.parent.mkdir(parents=True, exist_ok=True)
    kind = subprocess.run(
        ["stat", "-fc", "%T", layout.state.parent], check=True, capture_output=True, text=True
    ).stdout.strip()
    if kind == "overlayfs":
        raise ClusterError(
            f"{layout.state} is on an overlay file system: set ELASTICJOB_STATE to a folder on a plain disk or tmpfs"
        )


def program(name: str) -> str | None:
    """Return the path of a program. The search includes sbin folders, which may not be in a user's PATH."""
    return shutil.which(name, path=PATH)


def cni_folder() -> Path | None:
    """Return the folder of the network plugins; None where they are not installed."""
    for folder in CNI_FOLDERS:
        if all((folder / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    return None


def missing_packages() -> list[str]:
    packages = {package for name, package in PACKAGES.items() if program(name) is None}
    if cni_folder() is None:
        packages.add(CNI_PACKAGE)
    return sorted(packages)

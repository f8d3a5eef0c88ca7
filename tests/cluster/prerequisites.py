"""What a machine must have before a bare cluster can start, and installing what Debian can give."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import cgroups
from .console import say
from .errors import ClusterError
from .layout import Layout
from .processes import PATH

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
"""Program → Debian package that has it."""
CNI_PACKAGE = "containernetworking-plugins"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
CNI_PLUGINS = ("ptp", "host-local", "loopback", "portmap")
SOCKET_PATH = 107
"""Longest path of a Unix socket, bytes."""
LONGEST_SOCKET = "node200/kubelet/device-plugins/kubelet.sock"


def check(layout: Layout) -> None:
    """Raises ClusterError with one line on what to do; installs missing Debian packages."""
    if sys.platform != "linux":
        raise ClusterError("the bare cluster needs Linux; elsewhere start Docker and put `kind` on the PATH")
    if os.geteuid() != 0:
        raise ClusterError(
            "a cluster makes network namespaces and cgroups: run as root, for instance `sudo make cluster`"
        )
    if (trouble := cgroups.problem()) is not None:
        raise ClusterError(trouble)
    if len(str(layout.state)) + 1 + len(LONGEST_SOCKET) > SOCKET_PATH:
        limit = SOCKET_PATH - 1 - len(LONGEST_SOCKET)
        raise ClusterError(
            f"{layout.state} is too long for Unix sockets: set ELASTICJOB_STATE to a path of <= {limit} bytes"
        )
    check_overlay(layout)
    if packages := missing_packages():
        install(packages)
    if packages := missing_packages():
        raise ClusterError(f"still missing after the installation: {' '.join(packages)}; install them by hand")


def check_overlay(layout: Layout) -> None:
    """Images are unpacked as overlays, which cannot lie on another overlay."""
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
            f"{layout.state} lies on an overlay: set ELASTICJOB_STATE to a folder on a plain disk or tmpfs"
        )


def program(name: str) -> str | None:
    """Path of a program, also where a user's PATH leaves out the system's folders."""
    return shutil.which(name, path=PATH)


def cni_folder() -> Path | None:
    """Where the network plugins are, None without them."""
    for folder in CNI_FOLDERS:
        if all((folder / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    return None


def missing_packages() -> list[str]:
    packages = {package for name, package in PACKAGES.items() if program(name) is None}
    if cni_folder() is None:
        packages.add(CNI_PACKAGE)
    return sorted(packages)


def install(packages: list[str]) -> None:
    """Debian's packages by apt-get; an error that lists them elsewhere."""
    wanted = " ".join(packages)
    if program("apt-get") is None:
        raise ClusterError(f"missing: {wanted} (Debian's names); install them with this system's package manager")
    say(f"installing Debian packages: {wanted}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    commands = (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])
    for command in commands:
        result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if result.returncode != 0:
            reason = (result.stderr.strip() or result.stdout.strip()).splitlines()
            raise ClusterError(f"`{' '.join(command)}` failed: {reason[-1] if reason else result.returncode}")

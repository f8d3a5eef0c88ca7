"""Remove everything that a cluster created on the machine, also after a crash or an incomplete start."""

import json
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from host import files

from . import cgroups, network, processes, shims
from .errors import ClusterError

SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Sysctls that a kubelet sets for the whole machine."""
RECORD = "machine.json"
"""The first file in a state folder; it marks the folder as one."""
CONTAINER_LINKS = Path("/var/log/containers")
CNI_RESULTS = Path("/var/lib/cni/results")
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
RUN_NETNS = Path("/run/netns")
SHARED = (CONTAINER_LINKS, CNI_RESULTS, shims.SOCKETS, DEVICE_PLUGINS, Path("/run/containerd/fifo"))
"""Folders whose paths kubelet, containerd and network plugins fix. Only the cluster's files in them are removed."""


def record_machine(state: Path) -> None:
    """Create the state folder, and record the state of the machine before the first change to it."""
    values = {name: Path("/proc/sys", name).read_text().strip() for name in SYSCTLS if Path("/proc/sys", name).exists()}
    absent = [str(folder) for shared in SHARED for folder in (shared, *shared.parents) if not folder.exists()]
    content = {"sysctls": values, "absent": sorted(set(absent), reverse=True), "netns_mounted": RUN_NETNS.is_mount()}
    state.mkdir(parents=True, exist_ok=True)
    (state / RECORD).write_text(json.dumps(content))


def restore_machine(state: Path) -> None:
    """Restore the recorded state, except for folders that other programs use by now."""
    try:
        before = json.loads((state / RECORD).read_text())
    except (OSError, ValueError):
        return  # the start was killed before it changed the machine
    for name, value in before["sysctls"].items():
        Path("/proc/sys", name).write_text(value)
    for folder in before["absent"]:
        remove_if_empty(Path(folder))
    if not before["netns_mounted"] and RUN_NETNS.is_dir() and not files.children(RUN_NETNS):
        subprocess.run(["umount", str(RUN_NETNS)], check=False, capture_output=True)
        remove_if_empty(RUN_NETNS)


def remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def clear(state: Path) -> None:
    """End every process of the cluster in `state` and remove everything it created, including the state folder."""
    end_processes(state)
    remove_shared(state)
    unmount(state)
    network.remove()
    cgroups.remove("ejnode*")
    restore_machine(state)
    remove_folder(state)


def end_processes(state: Path) -> None:
    """Send SIGKILL to all processes and containers of the cluster: none of them needs to save anything."""

    def remaining() -> list[processes.Process]:
        cgroups.kill_once("ejnode*")
        return processes.find(state)

    processes.kill(remaining)
    cgroups.kill("ejnode*")


def mounts(state: Path) -> list[str]:
    """Return the mount points below `state`, the longest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    decoded = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in points]
    return sorted((point for point in decoded if point.startswith(f"{state}/")), key=len, reverse=True)


def unmount(state: Path) -> None:
    for options in ([], ["--lazy"]):
        if points := mounts(state):
            subprocess.run(["umount", *options, *points], check=False, capture_output=True)
    if points := mounts(state):
        raise ClusterError(f"umount failed for {len(points)} mount points below {state}, such as {points[0]}")


def remove_shared(state: Path) -> None:
    """Remove the cluster's files from folders that other containers of the machine may use too."""
    for link in files.children(CONTAINER_LINKS, "*.log"):
        with suppress(FileNotFoundError):
            if link.is_symlink() and link.readlink().is_relative_to(state):
                link.unlink()
    for result in files.children(CNI_RESULTS):
        if f'"{state}/' in files.read(result):
            result.unlink(missing_ok=True)
    for home in files.children(state, "node*"):
        shims.remove(shims.sockets(home))
    if not Path("/var/lib/kubelet/config.yaml").exists():  # the machine may run a kubelet of its own, which uses them
        for name in ("kubelet.sock", "DEPRECATION"):
            (DEVICE_PLUGINS / name).unlink(missing_ok=True)


def remove_folder(state: Path) -> None:
    """Remove the state folder, but nothing across a mount, and no folder that a cluster did not create."""
    if not state.exists():
        return
    if files.children(state) and not (state / RECORD).exists():
        raise ClusterError(
            f"{state} holds files that no cluster created: empty it, or set ELASTICJOB_STATE to another folder"
        )
    subprocess.run(["rm", "-rf", "--one-file-system", str(state)], check=True)

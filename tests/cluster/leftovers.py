"""Clearing all that a cluster made on the machine, whether it ended well, was killed, or never got up."""

import json
import re
import subprocess
from pathlib import Path

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
"""What a kubelet sets for the whole machine."""
RECORD = "machine.json"
"""The first file in a state folder, and what tells that it is one."""
CONTAINER_LINKS = Path("/var/log/containers")
CNI_RESULTS = Path("/var/lib/cni/results")
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
RUN_NETNS = Path("/run/netns")
SHARED = (CONTAINER_LINKS, CNI_RESULTS, shims.SOCKETS, DEVICE_PLUGINS, Path("/run/containerd/fifo"))
"""Folders with paths fixed in kubelet, containerd and the network plugins: only what we added to them is removed."""


def record_machine(state: Path) -> None:
    """Makes the state folder and writes into it what the machine was like before the first change."""
    values = {name: Path("/proc/sys", name).read_text().strip() for name in SYSCTLS if Path("/proc/sys", name).exists()}
    absent = [str(folder) for shared in SHARED for folder in (shared, *shared.parents) if not folder.exists()]
    content = {"sysctls": values, "absent": sorted(set(absent), reverse=True), "netns_mounted": RUN_NETNS.is_mount()}
    state.mkdir(parents=True, exist_ok=True)
    (state / RECORD).write_text(json.dumps(content))


def restore_machine(state: Path) -> None:
    """Puts back what `record_machine` saw, as far as nobody else uses it by now."""
    try:
        before = json.loads((state / RECORD).read_text())
    except (OSError, ValueError):
        return  # the start was killed before it changed anything
    for name, value in before["sysctls"].items():
        Path("/proc/sys", name).write_text(value)
    for folder in before["absent"]:
        remove_if_empty(Path(folder))
    if not before["netns_mounted"] and RUN_NETNS.is_dir() and not any(RUN_NETNS.iterdir()):
        subprocess.run(["umount", str(RUN_NETNS)], check=False, capture_output=True)
        remove_if_empty(RUN_NETNS)


def remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def clear(state: Path) -> None:
    """Ends every process of the cluster in `state` and removes all it made, the state folder too."""
    end_processes(state)
    remove_shared(state)
    unmount(state)
    network.remove()
    cgroups.remove("ejnode*")
    restore_machine(state)
    remove_folder(state)


def end_processes(state: Path) -> None:
    """SIGKILL: nothing of a cluster that goes needs an orderly end, and its containers go with their nodes."""

    def remaining() -> list[processes.Process]:
        cgroups.kill_once("ejnode*")
        return processes.find(state)

    processes.kill(remaining)
    cgroups.kill("ejnode*")


def mounts(state: Path) -> list[str]:
    """Mount points below `state`, the deepest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    decoded = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in points]
    return sorted((point for point in decoded if point.startswith(f"{state}/")), key=len, reverse=True)


def unmount(state: Path) -> None:
    for options in ([], ["--lazy"]):
        if points := mounts(state):
            subprocess.run(["umount", *options, *points], check=False, capture_output=True)
    if points := mounts(state):
        raise ClusterError(f"cannot unmount {points[0]} and {len(points) - 1} more below {state}")


def remove_shared(state: Path) -> None:
    """Our files in folders that other containers of the machine may use too."""
    for link in CONTAINER_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(state):
            link.unlink()
    for result in CNI_RESULTS.glob("*"):
        if f'"{state}/' in result.read_text(errors="replace"):
            result.unlink()
    for home in state.glob("node*"):
        shims.remove(shims.sockets(home))
    if not Path("/var/lib/kubelet/config.yaml").exists():  # a kubelet of this machine's own would use them
        for name in ("kubelet.sock", "DEPRECATION"):
            (DEVICE_PLUGINS / name).unlink(missing_ok=True)


def remove_folder(state: Path) -> None:
    """Removes the state folder, never across a mount, and never a folder that no cluster made."""
    if not state.exists():
        return
    if any(state.iterdir()) and not (state / RECORD).exists():
        raise ClusterError(f"{state} holds something else: empty it, or set ELASTICJOB_STATE to another folder")
    subprocess.run(["rm", "-rf", "--one-file-system", str(state)], check=True)

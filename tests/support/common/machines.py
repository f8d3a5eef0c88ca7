"""Machines as network namespaces with one link each to a bridge. The caller needs a network namespace of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

OWN_NAMESPACE = ["unshare", "--net"]
_ROOT = Path(__file__).parents[3]


def run_tool(*command: str) -> None:
    subprocess.run(command, check=True)


def run_within_namespace(path: str, *arguments: str, timeout: float) -> str:
    """Run a Python file in a network namespace of its own, with `support` on its path; return its output."""
    folders = os.pathsep.join(str(_ROOT / name) for name in ("agent", "operator", "tests"))
    done = subprocess.run(
        [*OWN_NAMESPACE, sys.executable, path, *arguments],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextlib.contextmanager
def machines(addresses: Sequence[Sequence[str]], own: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield a command for each machine, which runs another one there.

    `addresses`: those of each machine, with the lengths of their prefixes. `own`: those of this process. The name of
    machine 0 is `machine-0`, and its file /etc/hosts has its addresses, as that of a pod.
    """
    run_tool("ip", "link", "set", "lo", "up")
    run_tool("ip", "link", "add", "br0", "type", "bridge")
    run_tool("ip", "link", "set", "br0", "up")
    for address in own:
        _add_address((), address, "br0")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        yield tuple(_start_machine(index, found, Path(folder), running) for index, found in enumerate(addresses))


def _start_machine(
    index: int, addresses: Sequence[str], folder: Path, running: contextlib.ExitStack
) -> tuple[str, ...]:
    process = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "600"])
    running.callback(process.wait)
    running.callback(process.kill)
    _wait_for_namespaces(process.pid)
    within = ("nsenter", "--net", "--uts", "--mount", f"--target={process.pid}")
    name = f"machine-{index}"
    hosts = folder / name
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address.partition('/')[0]} {name}" for address in addresses)]
    hosts.write_text("\n".join(lines) + "\n")
    run_tool("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    run_tool("ip", "link", "set", f"v{index}", "master", "br0", "up")
    run_tool(*within, "hostname", name)
    run_tool(*within, "mount", "--bind", str(hosts), "/etc/hosts")
    run_tool(*within, "ip", "link", "set", "lo", "up")
    for address in addresses:
        _add_address(within, address, "eth0")
    run_tool(*within, "ip", "link", "set", "eth0", "up")
    return within


def _wait_for_namespaces(pid: int) -> None:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/ns/{kind}").readlink() == Path(f"/proc/self/ns/{kind}").readlink() for kind in _KINDS):
        assert time.monotonic() < deadline
        time.sleep(0.01)


_KINDS = ("net", "uts", "mnt")


def _add_address(within: Sequence[str], address: str, device: str) -> None:
    """Add an address. One of IPv6 is used at once, without a search for its duplicates."""
    run_tool(*within, "ip", "addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []))

"""A kube-apiserver and its etcd as child processes on loopback ports: no node, no scheduler, no controller."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import build, pki
from cluster.control_plane import api_server_flags, etcd_flags
from cluster.layout import Layout
from elasticjob._runtime.agent.processes import die_with_parent
from support.common.ports import free_ports

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class ApiServer:
    """Where the API server listens, and the administrator's credentials for it."""

    url: str
    pki: Path
    """Folder of the certificates."""
    kubeconfig: Path


@contextmanager
def api_server(folder: Path, release: build.Release | None = None) -> Iterator[ApiServer]:
    """Start both programs, with all that they write in `folder`, and end them. They may not serve yet."""
    release = release or build.find_release()
    programs = build.programs(Layout.default(), release)
    client, peer, port = free_ports(3)
    server = ApiServer(f"https://{ADDRESS}:{port}", folder / "pki", folder / "kubeconfig")
    pki.create(server.pki, (), server.kubeconfig, server.url)
    etcd = f"http://{ADDRESS}:{client}"
    # No pod reaches the API server by its Service, which must not have a loopback address.
    own = api_server_flags(server.pki, etcd, ADDRESS, port, release)
    flags = [*own, "--endpoint-reconciler-type=none"]
    with ExitStack() as stack:
        for name, arguments in (
            ("etcd", etcd_flags(folder / "etcd", etcd, f"http://{ADDRESS}:{peer}")),
            ("kube-apiserver", flags),
        ):
            stack.enter_context(_process([programs.path(name), *arguments], folder / f"{name}.log"))
        yield server


@contextmanager
def garbage_collector(server: ApiServer, folder: Path) -> Iterator[None]:
    """Run Kubernetes' garbage collector, which deletes the objects of deleted owners."""
    (port,) = free_ports(1)
    flags = [
        f"--kubeconfig={server.kubeconfig}",
        "--controllers=garbage-collector-controller",
        "--leader-elect=false",
        f"--bind-address={ADDRESS}",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'controller-manager'}",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]
    program = build.programs(Layout.default()).path("kube-controller-manager")
    with _process([program, *flags], folder / "kube-controller-manager.log"):
        yield


@contextmanager
def _process(argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", preexec_fn=die_with_parent
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()

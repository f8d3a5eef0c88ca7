"""metrics-server as a process of this machine, and the API that it serves to the test cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.build import metrics_server as build_metrics_server
from cluster.layout import HOST_ADDRESS, Layout
from elasticjob._runtime.agent.processes import die_with_parent
from support.cluster.kube import Json, Kube, is_true

PORT = 10443
NAMESPACE = "kube-system"
NAME = "metrics-server"
GROUP, VERSION = "metrics.k8s.io", "v1beta1"


@contextmanager
def metrics_server(kube: Kube, authority: Path, folder: Path) -> Iterator[None]:
    """Run metrics-server, whose files are in `folder`, until the context ends.

    `authority`: the certificate that has signed those of the kubelets.
    """
    flags = {
        **{f"{kind}kubeconfig": kube.kubeconfig for kind in ("", "authentication-", "authorization-")},
        "kubelet-certificate-authority": authority,
        "kubelet-preferred-address-types": "InternalIP",
        "metric-resolution": "10s",  # the shortest; it must be above the next
        "kubelet-request-timeout": "5s",
        "bind-address": HOST_ADDRESS,
        "secure-port": PORT,
        "cert-dir": folder,
    }
    program = build_metrics_server(Layout.default())
    with ExitStack() as stack:
        log = stack.enter_context((folder / "metrics-server.log").open("wb"))
        process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        for plural, namespace, body in api_objects():
            name = body["metadata"]["name"]
            kube.create(plural, body, namespace)
            stack.callback(kube.delete, plural, name, namespace)
        available = lambda service: is_true(service, "Available")  # noqa: E731
        kube.wait("apiservices", f"{VERSION}.{GROUP}", None, available, timeout=60, what="metrics-server serves")
        yield


def api_objects() -> list[tuple[str, str | None, Json]]:
    """Return what sends requests of the API to metrics-server: plural, namespace and body."""
    port = {"name": "https", "port": PORT, "protocol": "TCP"}
    labels = {"kubernetes.io/service-name": NAME, "endpointslice.kubernetes.io/managed-by": "elasticjob-tests"}
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": NAME, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
        "ports": [port],
    }
    spec = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"name": NAME, "namespace": NAMESPACE, "port": PORT},
    }
    metadata = {"name": f"{VERSION}.{GROUP}"}
    return [
        ("services", NAMESPACE, {"metadata": {"name": NAME}, "spec": {"ports": [port]}}),
        ("endpointslices", NAMESPACE, slice_),
        (
            "apiservices",
            None,
            {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata, "spec": spec},
        ),
    ]

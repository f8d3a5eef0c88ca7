"""DNS of the cluster: CoreDNS's configuration, its Service, and a query that checks it."""

import socket
import struct
from pathlib import Path
from typing import Any

from .api import Api
from .layout import API_SERVICE, CONTROL_ADDRESS, DNS_DOMAIN, DNS_SERVICE

PROBE = f"kubernetes.default.svc.{DNS_DOMAIN}"
_SERVICES = "/api/v1/namespaces/kube-system/services"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"


def write_corefile(target: Path, kubeconfig: Path) -> Path:
    """Write CoreDNS's configuration: it answers for the cluster and reverse look-ups, and NXDOMAIN for other names.

    Without an immediate answer, each torch socket waits 10 s for the reverse look-up of its peer.
    """
    target.write_text(
        f"""{DNS_DOMAIN}:53 in-addr.arpa:53 {{
    bind {CONTROL_ADDRESS}
    errors
    kubernetes {DNS_DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 0
    }}
}}
.:53 {{
    bind {CONTROL_ADDRESS}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
    )
    return target


def publish(api: Api) -> None:
    """Create the Service kube-dns, whose endpoint is the control plane's address, and CoreDNS's permissions."""
    name = "kube-dns"
    labels = {"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "elasticjob-cluster"}
    ports = [{"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    spec = {"clusterIP": DNS_SERVICE, "ports": ports}
    create(api, _SERVICES, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    create(
        api,
        _SLICES,
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [CONTROL_ADDRESS], "conditions": {"ready": True}}],
            "ports": ports,
        },
    )
    role: dict[str, Any] = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "system:coredns"}}
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    create(api, f"{_RBAC}/clusterroles", {**role, "kind": "ClusterRole", "rules": rules})
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    binding = {**role, "kind": "ClusterRoleBinding", "subjects": [user], "roleRef": reference}
    create(api, f"{_RBAC}/clusterrolebindings", binding)


def create(api: Api, path: str, body: dict[str, Any]) -> None:
    api.request("POST", path, body)


def problem() -> str | None:
    """Return None when CoreDNS, queried from the host at its ClusterIP, resolves the API server; else the problem."""
    try:
        addresses = query_dns(PROBE)
    except OSError as error:
        return f"DNS at {DNS_SERVICE}: {error}"
    return None if API_SERVICE in addresses else f"DNS at {DNS_SERVICE} resolves {PROBE} to {addresses}"


def query_dns(name: str, timeout: float = 0.3) -> list[str]:
    """Return the IPv4 addresses of `name` by one UDP query; OSError without an answer within `timeout` seconds."""
    question = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
    query = struct.pack("!6H", 0x656A, 0x0100, 1, 0, 0, 0) + question + struct.pack("!2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.settimeout(timeout)
        channel.connect((DNS_SERVICE, 53))
        channel.send(query)
        answer = channel.recv(1500)
    # A records are found by their type (A), class (IN) and length (4), without parsing the message.
    records = answer[len(query) :].split(b"\0\1\0\1")[1:]
    return [socket.inet_ntoa(record[6:10]) for record in records if record[4:6] == b"\0\4"]

"""Keys and certificates of the cluster, and the kubeconfigs that contain them."""

import base64
import json
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .layout import API_PORT, API_SERVICE, CONTROL_ADDRESS, DNS_DOMAIN, Node

SERVER = f"https://{CONTROL_ADDRESS}:{API_PORT}"
_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650"]


@dataclass(frozen=True)
class Identity:
    """One certificate to issue."""

    name: str
    """Name of its two files, without extension."""
    subject: str
    """User and group in the cluster."""
    names: str = ""
    """subjectAltName of a server; empty for a client."""


API_NAMES = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DNS_DOMAIN}"]
FIXED = (
    Identity(
        "apiserver",
        "/CN=kube-apiserver",
        ",".join(
            [*(f"DNS:{name}" for name in API_NAMES), f"IP:{CONTROL_ADDRESS}", f"IP:{API_SERVICE}", "IP:127.0.0.1"]
        ),
    ),
    Identity("admin", "/O=system:masters/CN=admin"),
    Identity("controller-manager", "/CN=system:kube-controller-manager"),
    Identity("scheduler", "/CN=system:kube-scheduler"),
    Identity("kube-proxy", "/CN=system:kube-proxy"),
    Identity("apiserver-kubelet", "/O=system:masters/CN=apiserver-kubelet"),
    Identity("front-proxy", "/CN=front-proxy"),
    Identity("coredns", "/CN=system:coredns"),
)
COMPONENTS = ("controller-manager", "scheduler", "kube-proxy", "coredns")


def create(folder: Path, nodes: Iterable[Node], kubeconfig: Path, server: str = SERVER) -> None:
    """Create all keys, certificates and kubeconfigs of a cluster in `folder`, and the admin's at `kubeconfig`.

    `server`: the API server's URL. The kubeconfigs of components have the bare cluster's.
    """
    folder.mkdir(parents=True, mode=0o700)
    names = list(nodes)
    authority(folder)
    identities = [*FIXED, *map(node_identity, names)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda identity: sign(folder, identity), identities))
    for name in [*COMPONENTS, *(node.name for node in names)]:
        write_kubeconfig(folder, name, folder / f"{name}.kubeconfig")
    write_kubeconfig(folder, "admin", kubeconfig, server)


def node_identity(node: Node) -> Identity:
    """Return a kubelet's identity, by which the node authorizer recognizes it."""
    return Identity(node.name, f"/O=system:nodes/CN=system:node:{node.name}", f"DNS:{node.name},IP:{node.address}")


def authority(folder: Path) -> None:
    """Create the cluster's certificate authority, and the key that signs tokens of ServiceAccounts."""
    files = ["-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt")]
    # Python 3.13 verifies strictly: the authority's certificate must have the key usage keyCertSign.
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    openssl("req", "-x509", *_KEY, *files, "-subj", "/CN=elasticjob-cluster", *usage)
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(folder / "sa.key"))
    openssl("pkey", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub"))


def sign(folder: Path, identity: Identity) -> None:
    """Create one key, and its certificate signed by the authority."""
    extensions = ["-addext", "extendedKeyUsage=clientAuth,serverAuth", "-addext", "basicConstraints=critical,CA:FALSE"]
    if identity.names:
        extensions += ["-addext", f"subjectAltName={identity.names}"]
    issuer = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    files = ["-keyout", str(folder / f"{identity.name}.key"), "-out", str(folder / f"{identity.name}.crt")]
    openssl("req", "-x509", *_KEY, *issuer, *files, "-subj", identity.subject, *extensions)


def openssl(*arguments: str) -> None:
    result = subprocess.run(["openssl", *arguments], check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed (OpenSSL 3 is required): {result.stderr.strip()}")


def write_kubeconfig(folder: Path, name: str, target: Path, server: str = SERVER) -> None:
    """Write a kubeconfig that contains its certificates, so that it can be copied."""

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    content: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "elasticjob",
        "clusters": [
            {"name": "elasticjob", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}
        ],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")},
            }
        ],
        "contexts": [{"name": "elasticjob", "context": {"cluster": "elasticjob", "user": name}}],
    }
    target.touch(mode=0o600)
    target.write_text(json.dumps(content, indent=1) + "\n")

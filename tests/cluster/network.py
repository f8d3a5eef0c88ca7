"""The network: a bridge on the host, one network namespace per node and one for the control plane.

The control plane has a namespace of its own for two reasons. Its components take no ports of the host. And the host
routes ClusterIPs to the kube-proxy in that namespace, so that the host's own iptables rules stay unchanged.
"""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from host import files

from .errors import ClusterError
from .layout import (
    BRIDGE,
    BRIDGE_MAC,
    CONTROL,
    CONTROL_ADDRESS,
    HOST_ADDRESS,
    NODE_NETWORK,
    POD_NETWORK,
    SERVICE_NETWORK,
    Node,
)

PREFIX = NODE_NETWORK.rpartition("/")[2]
CONTROL_LINK = "ejvc"


def ip(*arguments: str, batch: Sequence[str] = ()) -> str:
    """Run `ip`, with a batch of commands where given; return its output."""
    command = ["ip", *arguments] if not batch else ["ip", *arguments, "-batch", "-"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, input="\n".join(batch))
    if result.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def check_free() -> None:
    """Raise ClusterError where the host already has a route to one of the cluster's networks."""
    routes = ip("-4", "route", "show", "table", "all").splitlines()
    taken = tuple(network.rsplit(".", 2)[0] + "." for network in (NODE_NETWORK, POD_NETWORK, SERVICE_NETWORK))
    for route in routes:
        words = route.split()
        target = next((word for word in words if word[0].isdigit()), "")
        if target.startswith(taken):
            raise ClusterError(
                f"this host already uses an address range of the cluster ({route.strip()}): remove that route"
            )


def create(nodes: Iterable[Node]) -> None:
    """Create bridge, namespaces, veth pairs and routes."""
    members = list(nodes)
    for namespace in (CONTROL, *(node.namespace for node in members)):
        ip("netns", "add", namespace)
    # A fixed address: without one, a bridge has the lowest of its ports' addresses, which changes with the ports.
    host = [
        f"link add {BRIDGE} address {BRIDGE_MAC} type bridge",
        f"addr add {HOST_ADDRESS}/{PREFIX} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"route add {SERVICE_NETWORK} via {CONTROL_ADDRESS}",
    ]
    ip(batch=host)
    attach(CONTROL, CONTROL_LINK, CONTROL_ADDRESS, members)
    for node in members:
        attach(node.namespace, node.link, node.address, [other for other in members if other != node])
    ip(batch=[pod_route(node) for node in members])


def attach(namespace: str, link: str, address: str, peers: Iterable[Node]) -> None:
    """Connect a namespace to the bridge, and add routes to the pods of `peers`.

    There is no default route: a connection to an address outside the cluster fails at once and not by time-out.
    """
    ip(batch=[f"link add {link} type veth peer name eth0 netns {namespace}", f"link set {link} master {BRIDGE} up"])
    inside = [
        "link set lo up",
        f"addr add {address}/{PREFIX} dev eth0",
        "link set eth0 up",
        # kube-proxy rewrites the destination of each such packet, but the kernel requires a route before that.
        f"route add {SERVICE_NETWORK} dev eth0",
        *map(pod_route, peers),
        # Without this rule, a pod's connection to an address outside the cluster would only fail by time-out.
        f"rule add pref 40000 from {POD_NETWORK} prohibit",
    ]
    ip("-n", namespace, batch=inside)
    enter = ["nsenter", f"--net=/run/netns/{namespace}", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
    subprocess.run(enter, check=True)


def pod_route(node: Node) -> str:
    return f"route add {node.pod_network} via {node.address}"


def plug(node: Node, connected: bool) -> None:
    """Set the node's link up or down; addresses and routes inside the namespace stay."""
    ip("link", "set", node.link, "up" if connected else "down")


def plugged(node: Node) -> bool:
    try:
        return "state DOWN" not in ip("-o", "link", "show", node.link)
    except ClusterError:
        return False


def namespaces() -> list[str]:
    """Return the network namespaces of all bare clusters on this machine."""
    return [entry.name for entry in files.children(Path("/run/netns"), "ej*")]


def remove() -> None:
    """Remove everything that `create` creates, also after an incomplete `create`."""
    for namespace in namespaces():
        ip("netns", "del", namespace)
    links = [entry.name for entry in files.children(Path("/sys/class/net"), "ej*")]
    for link in links:
        # Removing a namespace removes both ends of its veth pair, so the link may no longer exist.
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)

"""Translate NetworkPolicies into nftables rules of one node.

A pod that a policy selects has a chain per direction, which returns for what a policy allows and drops the rest. A pod
whose address the API server does not show yet can open and accept no connection. Open connections stay open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from support.cluster.kube import Json, Objects

TABLE = "elasticjob_network_policies"
REMOVE = f"table ip {TABLE}\ndelete table ip {TABLE}\n"
"""The first line creates a table that may not exist, so that the second one does not fail."""
Direction = Literal["ingress", "egress"]
DIRECTIONS: tuple[Direction, ...] = ("ingress", "egress")
_OWN = {"ingress": "daddr", "egress": "saddr"}
"""The address of the selected pod in a packet of a new connection."""
_PEER = {"ingress": "saddr", "egress": "daddr"}


@dataclass(frozen=True)
class View:
    """What the API server shows."""

    pods: Objects
    namespaces: Objects
    policies: Objects

    def namespace_labels(self, name: str) -> Json:
        found = (n["metadata"].get("labels", {}) for n in self.namespaces if n["metadata"]["name"] == name)
        return next(found, {})


def ruleset(view: View, node: str, pod_network: str) -> str:
    """Return the input of `nft -f` that replaces the rules of a node, whose pods have addresses of `pod_network`."""
    local = [pod for pod in view.pods if pod["spec"].get("nodeName") == node and address(pod)]
    dispatch = [_drop_unknown(end, pod_network, local) for end in ("saddr", "daddr")]
    chains = []
    for pod in local:
        for direction in DIRECTIONS:
            rules = chain_rules(view, pod, direction)
            if rules is not None:
                name = f"{direction}_{address(pod).replace('.', '_')}"
                chains.append(_chain(name, [*rules, "counter drop"]))
                dispatch.append(f"ip {_OWN[direction]} {address(pod)} jump {name}")
    # After the translation of ClusterIPs, so that the rules match pods.
    base = ["type filter hook forward priority filter; policy accept;", "ct state established,related accept"]
    return "\n".join([REMOVE, f"table ip {TABLE} {{", *chains, _chain("forward", [*base, *dispatch]), "}", ""])


def _drop_unknown(end: str, pod_network: str, local: Objects) -> str:
    known = f"ip {end} != {_set(map(address, local))} " if local else ""
    return f"ip {end} {pod_network} {known}counter drop"


def _set(addresses: Iterable[str]) -> str:
    return f"{{ {', '.join(sorted(addresses))} }}"


def _chain(name: str, rules: Iterable[str]) -> str:
    return "\n".join([f"chain {name} {{", *rules, "}"])


def chain_rules(view: View, pod: Json, direction: Direction) -> list[str] | None:
    """Return the rules that allow connections of a pod; None where no policy selects the pod."""
    selecting = [policy for policy in view.policies if _selects_pod(policy, pod, direction)]
    if not selecting:
        return None
    return [
        " ".join([*source, *ports, "return"])
        for policy in selecting
        for rule in policy["spec"].get(direction, [])
        for source in _peers(view, policy, rule.get("from" if direction == "ingress" else "to"), direction)
        for ports in _ports(rule.get("ports"))
    ]


def _selects_pod(policy: Json, pod: Json, direction: Direction) -> bool:
    spec = policy["spec"]
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return same and direction.title() in spec["policyTypes"] and selects(spec["podSelector"], _labels(pod))


def _peers(view: View, policy: Json, peers: Objects | None, direction: Direction) -> list[list[str]]:
    """Return the match of a rule's peers: none where it names no peers, no rule where no pod is one of them."""
    if not peers:
        return [[]]
    found = {address(pod) for peer in peers for pod in view.pods if address(pod) and _is_peer(view, policy, peer, pod)}
    return [[f"ip {_PEER[direction]} {_set(found)}"]] if found else []


def _is_peer(view: View, policy: Json, peer: Json, pod: Json) -> bool:
    if unknown := set(peer) - {"podSelector", "namespaceSelector"}:
        raise NotImplementedError(f"peers by {unknown}")
    namespace = pod["metadata"]["namespace"]
    if "namespaceSelector" in peer:
        inside = selects(peer["namespaceSelector"], view.namespace_labels(namespace))
    else:
        inside = namespace == policy["metadata"]["namespace"]
    return inside and selects(peer.get("podSelector", {}), _labels(pod))


def _ports(ports: Objects | None) -> list[list[str]]:
    """Return the match of each port of a rule; one of all ports where it names none."""
    return [[f"{port['protocol'].lower()} dport {int(port['port'])}"] for port in ports] if ports else [[]]


def selects(selector: Json, labels: Json) -> bool:
    """Return whether a label selector selects an object with these labels."""
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(_holds(expression, labels) for expression in selector.get("matchExpressions", []))


def _holds(expression: Json, labels: Json) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case other:
            raise NotImplementedError(f"operator {other}")


def address(pod: Json) -> str:
    """Return the address of a pod; empty while it has none of its own, and once it has ended."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    shared = pod["spec"].get("hostNetwork", False)
    return "" if ended or shared else str(pod.get("status", {}).get("podIP", ""))


def _labels(pod: Json) -> Json:
    labels: Json = pod["metadata"].get("labels", {})
    return labels

"""Enforce NetworkPolicies on the nodes of the bare cluster. `python -m network_policies.enforcer` removes the rules."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import verbs
from cluster.bare import BareCluster
from cluster.console import console
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.prerequisites import program
from host.debian_packages import install
from network_policies.rules import REMOVE, View, ruleset
from support.cluster.kube import Kube

POLL_SECONDS = 0.2
"""Seconds between two reads of pods and policies. A network plugin, too, applies a change some time after it."""


@contextmanager
def enforcing(kubeconfig: Path) -> Iterator[None]:
    """Enforce until the context ends, then remove the rules and raise the error of an update that failed."""
    if program("nft") is None:
        install(["nftables"], console)
    errors: list[Exception] = []
    end = threading.Event()
    thread = threading.Thread(target=_enforce, args=(Kube(kubeconfig), nodes(), end, errors))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        remove()
    if errors:
        raise errors[0]


def _enforce(kube: Kube, members: list[Node], end: threading.Event, errors: list[Exception]) -> None:
    applied: dict[str, str] = {}
    try:
        while not end.wait(POLL_SECONDS):
            view = View(*(kube.list(plural) for plural in ("pods", "namespaces", "networkpolicies")))
            for node in members:
                rules = ruleset(view, node.name, node.pod_network)
                if rules != applied.get(node.name):
                    nft(node, rules)
                    applied[node.name] = rules
    except Exception as error:
        errors.append(error)


def nft(node: Node, rules: str) -> None:
    """Change the packet filter of a node. All of `rules` applies at once, or nothing."""
    command = ["nsenter", f"--net=/run/netns/{node.namespace}", "nft", "-f", "-"]
    done = subprocess.run(command, input=rules, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"nft refuses the rules of {node.name}: {done.stderr.strip()}")


def nodes() -> list[Node]:
    """Return the nodes of the running cluster; ClusterError where it is not a bare one."""
    cluster = verbs.cluster()
    if not isinstance(cluster, BareCluster):
        raise ClusterError("only the bare cluster can enforce NetworkPolicies here: kind has a network plugin")
    return cluster.layout.nodes(cluster.running().nodes)


def remove() -> None:
    """Remove the rules from every node, also those that an interrupted run has left."""
    for node in nodes():
        nft(node, REMOVE)


if __name__ == "__main__":
    remove()

#!/usr/bin/env python3
"""A real Kubernetes cluster on this machine, from the command line. See docs/contribute/cluster.md."""

import argparse
import sys
from pathlib import Path

if not __package__:  # started as a file: this folder is a package one level up
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster import build, kueue, verbs
from cluster.layout import Layout
from host.errors import SetupError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the cluster, or repair the running one")
    up.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default 3)")
    help_grace = "seconds until a silent node counts as lost (the default of Kubernetes is 50)"
    up.add_argument("--node-monitor-grace-period", dest="grace", type=float, metavar="S", help=help_grace)
    up.add_argument("--replace", action="store_true", default=None, help="remove a running cluster of another clone")
    commands.add_parser("prepare", help="install and build what the cluster needs, without starting it")
    commands.add_parser("metrics-server", help="build metrics-server, which a test needs, and print its path")
    commands.add_parser("monitoring", help="build Prometheus and kube-state-metrics, and print their folder")
    commands.add_parser("kueue", help="build Kueue, which the tests of queues need, and print its folder")
    commands.add_parser("down", help="stop the cluster and remove everything it created")
    commands.add_parser("status", help="show the state of its components")
    load = commands.add_parser("load", help="load an image on every node")
    load.add_argument("archive", type=Path, metavar="IMAGE.tar")
    node = commands.add_parser("node", help="kill, cut, heal or restart a node")
    node.add_argument("verb", choices=["kill", "cut", "heal", "restart"])
    node.add_argument("node")
    gpus = commands.add_parser("gpus", help="let a node advertise GPUs")
    gpus.add_argument("node")
    gpus.add_argument("count", type=int)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    match options.command:
        case "up":
            verbs.up(options.nodes, options.grace, options.replace)
        case "prepare":
            verbs.prepare()
        case "metrics-server":
            print(build.metrics_server(Layout.default()))
        case "monitoring":
            print(build.monitoring(Layout.default()).folder)
        case "kueue":
            print(kueue.kueue(Layout.default()).folder)
        case "down":
            verbs.down()
        case "status":
            return show(verbs.status())
        case "load":
            verbs.load(options.archive)
        case "node":
            actions = {"kill": verbs.kill, "cut": verbs.cut, "heal": verbs.heal, "restart": verbs.restart}
            actions[options.verb](options.node)
        case "gpus":
            verbs.gpus(options.node, options.count)
    return 0


def show(parts: dict[str, str]) -> int:
    """Print the state of each component; return 0 when all are Ready."""
    for name, state in parts.items():
        print(f"{name:14} {state}")
    if not parts:
        print("no cluster is up")
    return 0 if parts and all(state == "Ready" for state in parts.values()) else 1


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(parse(arguments))
    except SetupError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; the next `up` or `down` removes what it created", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

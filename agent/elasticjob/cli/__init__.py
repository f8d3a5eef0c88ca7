"""The command line: `elasticjob run | convert | status | logs | why | ...`, and `agent` and `store` in pods.

Each subcommand imports its own modules, so that the agent and the store start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

_PLUGIN = "kubectl-elasticjob"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line in `argv` (default: `sys.argv`) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["agent", "--"] and len(arguments) > 2:
        from elasticjob._runtime.agent.main import main as agent

        return agent(arguments[2:])
    if arguments[:1] == ["store"]:
        import signal

        from elasticjob._runtime.system.early_signals import record_signals

        early, _ = record_signals((signal.SIGTERM, signal.SIGINT))
        from elasticjob._runtime.store_pod.main import main as store

        return store(arguments[1:], early)
    return _run_parsed(arguments[:1] if arguments == ["agent", "--"] else arguments)


def _run_parsed(arguments: Sequence[str]) -> int:
    from elasticjob.cli.arguments import command_parser, parse_command_line

    called_by_kubectl = sys.argv[0].rpartition("/")[2].startswith(_PLUGIN)
    parser = command_parser("kubectl elasticjob" if called_by_kubectl else "elasticjob", _version())
    _enable_completion(parser)
    options = parse_command_line(parser, arguments)
    match options.command:
        case "run":
            from elasticjob._runtime.local.main import main as run

            return run(options.manifest, nodes=options.nodes)
        case "convert":
            from elasticjob.convert.main import main as convert

            return convert(options.manifests, output=options.output, strict=options.strict, version=options.to)
        case "validate":
            from elasticjob.cli.verbs.validate import validate_manifests
            from elasticjob.cli.views.output import VerbOutput

            return validate_manifests(VerbOutput(None), options.manifests)
        case "explain":
            from elasticjob.cli.verbs.explain import show_explanation
            from elasticjob.cli.views.output import VerbOutput

            return show_explanation(VerbOutput(options.output), options.reason)
        case "version":
            print(_version())
            return 0
        case "agent":
            return parser.error("the command must follow `--`, for example: elasticjob agent -- python train.py")
        case _:
            from elasticjob.cli.cluster_command import run_cluster_command

            return run_cluster_command(options)


def _enable_completion(parser: argparse.ArgumentParser) -> None:
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _version() -> str:
    from elasticjob import __version__

    return __version__

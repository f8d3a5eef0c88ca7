"""The command line: `elasticjob agent | store | run | version`. What a subcommand needs is imported by it alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

USAGE = 64
"""Exit code for wrong flags (contract.names.ExitCode.USAGE, without importing it before the signals are caught)."""

_EXAMPLES = """
examples:
  elasticjob run job.yaml                     run a job's manifest as processes on this machine
  elasticjob run job.yaml --nodes 3           ... with three nodes, whatever spec.replicas says
  elasticjob agent -- python train.py --lr 1  what a worker pod runs (configured by ELASTICJOB_* variables)
  elasticjob store                            what a job's store pod runs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:2] == ["agent", "--"] and len(words) > 2:
        from elasticjob.agent.main import main as agent

        return agent(words[2:])
    if words[:1] == ["store"]:
        from elasticjob.store_pod.main import main as store

        return store(words[1:])
    return _parsed(words[:1] if words == ["agent", "--"] else words)


def _parsed(words: Sequence[str]) -> int:
    parser = _parser()
    _complete(parser)
    options = parser.parse_args(words)
    match options.verb:
        case "run":
            from elasticjob.local.main import main as run

            return run(options.manifest, nodes=options.nodes)
        case "version":
            print(_version())
            return 0
        case _:
            return parser.error("write the command after `--`, for instance: elasticjob agent -- python train.py")


def _parser() -> argparse.ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            self.print_usage(sys.stderr)
            self.exit(USAGE, f"{self.prog}: {message}\n")

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="elasticjob", description="Elastic PyTorch training jobs.", epilog=_EXAMPLES, formatter_class=raw
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    run = verbs.add_parser(
        "run",
        help="run a job's manifest as processes on this machine",
        description="Run an ElasticJob manifest with local processes: one store, and one agent for each replica."
        " Ctrl-C ends the job in good order, a second Ctrl-C at once.",
        epilog="exit codes: 0 succeeded, 1 failed, 64 the manifest or a flag is wrong, 130 interrupted",
        formatter_class=raw,
    )
    run.add_argument("manifest", help="YAML file with one ElasticJob")
    run.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: spec.replicas)")
    verbs.add_parser(
        "agent",
        help="run one node's agent: elasticjob agent -- COMMAND...",
        usage="elasticjob agent -- COMMAND [ARG...]",
    )
    verbs.add_parser("store", help="serve one job's store and coordinator", add_help=False)
    verbs.add_parser("version", help="print the version")
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _version() -> str:
    from elasticjob import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())

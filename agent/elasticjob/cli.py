"""The command line: `elasticjob agent | store | run | convert | version`.

Each subcommand imports its own modules, so that the agent and the store start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

USAGE = 64
"""Exit code for wrong flags: ExitCode.USAGE of contract.names, which must not be imported before signals are caught."""

_EXAMPLES = """
examples:
  elasticjob run job.yaml                     run a job's manifest as processes on this machine
  elasticjob run job.yaml --nodes 3           the same with three nodes; overrides spec.replicas
  elasticjob convert pytorchjob.yaml          print a PyTorchJob, TrainJob or JobSet as an ElasticJob
  elasticjob agent -- python train.py --lr 1  the command of a worker pod (reads ELASTICJOB_* variables)
  elasticjob store                            the command of a job's store pod
"""


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
    parser = _parser()
    _enable_completion(parser)
    options = parser.parse_args(arguments)
    match options.command:
        case "run":
            from elasticjob._runtime.local.main import main as run

            return run(options.manifest, nodes=options.nodes)
        case "convert":
            from elasticjob.convert.main import main as convert

            return convert(options.manifests, output=options.output, strict=options.strict, version=options.to)
        case "version":
            print(_version())
            return 0
        case _:
            return parser.error("the command must follow `--`, for example: elasticjob agent -- python train.py")


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
    parser.add_argument("--version", action="version", version=f"elasticjob {_version()}")
    subcommands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = subcommands.add_parser(
        "run",
        help="run a job's manifest as processes on this machine",
        description="Run an ElasticJob manifest with local processes: one store, and one agent for each replica."
        " Ctrl-C drains the nodes and ends the job; a second Ctrl-C kills them.",
        epilog="exit codes: 0 succeeded, 1 failed, 64 the manifest, its program or a flag is wrong, 130 interrupted",
        formatter_class=raw,
    )
    run.add_argument("manifest", help="YAML file with one ElasticJob")
    run.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: spec.replicas)")
    convert = subcommands.add_parser(
        "convert",
        help="print jobs of Kubeflow, HyperPod and JobSet as ElasticJobs, or ElasticJobs in another API version",
        description="Convert PyTorchJobs (kubeflow.org/v1), TrainJobs (trainer.kubeflow.org/v1alpha1),"
        " HyperPodPyTorchJobs (sagemaker.amazonaws.com/v1) and JobSets (jobset.x-k8s.io) to ElasticJobs,"
        " and ElasticJobs to another version of the API. Standard error gets a note for each field that has no"
        " counterpart.",
        epilog="exit codes: 0 converted, 1 notes with --strict, 2 the input is wrong, 64 a flag is wrong",
        formatter_class=raw,
    )
    convert.add_argument("manifests", nargs="+", metavar="FILE", help="YAML file with jobs; - is standard input")
    convert.add_argument("-o", "--output", metavar="FILE", help="write the ElasticJobs to this file")
    convert.add_argument(
        "--to",
        choices=["v1alpha1", "v1beta1"],
        default="v1alpha1",
        help="API version of the ElasticJobs (default: v1alpha1; v1beta1 is a preview that no cluster serves yet)",
    )
    convert.add_argument("--strict", action="store_true", help="write nothing and exit with 1 if there is a note")
    subcommands.add_parser(
        "agent",
        help="run one node's agent: elasticjob agent -- COMMAND...",
        usage="elasticjob agent -- COMMAND [ARG...]",
    )
    subcommands.add_parser("store", help="serve one job's store and coordinator", add_help=False)
    subcommands.add_parser("version", help="print the version")
    return parser


def _enable_completion(parser: argparse.ArgumentParser) -> None:
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

"""The parsers of the command line. Only argparse is imported: `elasticjob run` starts as fast as without the others."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

USAGE = 64
"""Exit code for wrong flags: ExitCode.USAGE of contract.names, which must not be imported before signals are caught."""

_EXAMPLES = """
examples, on this machine:
  elasticjob run job.yaml                     run a job's manifest as processes on this machine
  elasticjob run job.yaml --nodes 3           the same with three pods; overrides spec.replicas
  elasticjob convert pytorchjob.yaml          print a PyTorchJob, TrainJob or JobSet as an ElasticJob
  elasticjob explain OOMKilled                what a reason means, and what to do

examples, on the cluster of the kubeconfig:
  elasticjob status                           all jobs; with a name, one job on one screen
  elasticjob submit train.py --pods 4 --gpus 8 --image IMAGE -- --lr 1    run your script, without an image build
  elasticjob why bert                         why it does not run, is not at full size, or is slow
  elasticjob ui --open                        all jobs, live, in the browser

in pods:
  elasticjob agent -- python train.py --lr 1  the command of a worker pod (reads ELASTICJOB_* variables)
  elasticjob store                            the command of a job's store pod
"""
_CODES = (
    "exit codes: 0 done, 1 the API server refuses or the job is not as wanted, 64 a flag is wrong,"
    " 69 no cluster is reachable, 130 interrupted"
)
MOST_PODS = 4096
"""Most worker pods of a job, as in the CRD."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_ROUND = re.compile(r"[0-9]+(\.[0-9]+\.[0-9]+)?")
_OF_NEW_JOBS = (
    "script", "image", "name", "pods", "min_pods", "max_pods", "gpus", "workers", "cpu", "memory", "env", "pvc",
    "image_pull_secret", "dry_run",
)  # fmt: skip
"""Flags of `submit` that say how a new job is."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def command_parser(program: str, version: str) -> argparse.ArgumentParser:
    """Return the parser of all subcommands. `program`: the name by which it was called."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=program, description="Elastic PyTorch training jobs.", epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"elasticjob {version}")
    subcommands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_local(subcommands)
    _add_cluster(subcommands)
    return parser


def parse_command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `options.arguments` is what follows `--` after `submit`, and belongs to the script."""
    own, script = list(arguments), list[str]()
    if own[:1] == ["submit"] and "--" in own:
        at = own.index("--")
        own, script = own[:at], own[at + 1 :]
    options, unknown = parser.parse_known_args(own, argparse.Namespace(arguments=script))
    verb = str(options.command)
    if unknown:
        hint = ": arguments of the script follow --" if verb == "submit" else f": elasticjob {verb} --help lists all"
        parser.error(f"{verb}: unrecognized arguments: {' '.join(unknown)}{hint}")
    if problem := _wrong_together(options):
        parser.error(f"{verb}: {problem}")
    return options


def _wrong_together(options: argparse.Namespace) -> str:
    """Return why two flags exclude each other, or one lacks another; empty if all go together."""
    match options.command:
        case "status" if options.job and options.all_namespaces:
            return "-A shows all jobs: leave out JOB, or name its namespace with -n"
        case "logs" if options.follow and options.previous:
            return "-p shows pods that have ended, and -f those that run: choose one"
        case "logs" if options.store and (options.rank or options.round):
            return "lines of a store belong to no rank and no round: leave out --rank and --round, or --store"
        case "scale" | "suspend" | "resume" | "drain" if options.timeout is not None and not options.wait:
            return "--timeout is the time of --wait: write both, or none"
        case "submit" if options.update:
            names = [name for name in _OF_NEW_JOBS if getattr(options, name) not in (None, "", [], 0, False)]
            flags = ["SCRIPT" if name == "script" else f"--{name.replace('_', '-')}" for name in names]
            flags += ["--"] if options.arguments else []
            return f"--update changes nothing but the code: leave out {', '.join(flags)}" if flags else ""
        case "submit" if not (options.script and options.image):
            return "say which SCRIPT to run and in which --image, or which job to --update"
    return ""


def _add_local(subcommands: argparse._SubParsersAction[_Parser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    run = subcommands.add_parser(
        "run",
        help="run a job's manifest as processes on this machine",
        description="Run an ElasticJob manifest with local processes: one store, and one agent for each replica."
        " Ctrl-C drains the pods and ends the job; a second Ctrl-C kills them.",
        epilog="exit codes: 0 succeeded, 1 failed, 64 the manifest, its program or a flag is wrong, 130 interrupted",
        formatter_class=raw,
    )
    run.add_argument("manifest", help="YAML file with one ElasticJob")
    run.add_argument("--nodes", type=int, metavar="N", help="number of worker pods (default: spec.replicas)")
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
    validate = subcommands.add_parser(
        "validate",
        help="check manifests as the API server does, without a cluster",
        epilog="exit codes: 0 valid, 1 a manifest has a mistake, 64 a flag is wrong",
    )
    validate.add_argument(
        "manifests", nargs="+", metavar="FILE", help="YAML file with ElasticJobs; - is standard input"
    )
    explain = subcommands.add_parser(
        "explain",
        help="what a reason, a phase, an Event or a failure class means, and what to do",
        epilog="exit codes: 0 explained, 1 the name is unknown, 64 a flag is wrong",
    )
    explain.add_argument("reason", metavar="REASON", help="such as Unschedulable, OOMKilled or Degraded")
    _add_output(explain)
    subcommands.add_parser(
        "agent",
        help="run the agent of one worker pod: elasticjob agent -- COMMAND...",
        usage="elasticjob agent -- COMMAND [ARG...]",
    )
    subcommands.add_parser("store", help="serve one job's store and coordinator", add_help=False)
    subcommands.add_parser("version", help="print the version")


def _add_cluster(subcommands: argparse._SubParsersAction[_Parser]) -> None:
    _add_submit(subcommands)
    status = _verb(subcommands, "status", "one job on one screen; without a name, all jobs")
    status.add_argument("job", type=_job, metavar="JOB", nargs="?", help="name of the job")
    status.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    _add_output(status)
    events = _verb(subcommands, "events", "what happened to a job and its pods; without a name, to all jobs")
    events.add_argument("job", type=_job, metavar="JOB", nargs="?", help="name of the job")
    events.add_argument("--warnings", action="store_true", help="only warnings")
    events.add_argument("-w", "--watch", action="store_true", help="go on with new Events until Ctrl-C")
    _add_output(events)
    why = _verb(subcommands, "why", "why a job is not running, not at full size or slow, and the next command")
    _add_job(why)
    _add_output(why)
    logs = _verb(subcommands, "logs", "the logs of all ranks or of some; those of the pod that failed first")
    _add_job(logs)
    logs.add_argument("--rank", type=_numbers, default=[], metavar="N,...", help="only lines of these ranks")
    logs.add_argument(
        "--pod", type=_pod, action="append", default=[], metavar="POD", help="only this pod, by name or index"
    )
    logs.add_argument("--round", type=_round, metavar="N", help="only lines of this round, such as 3 or 1.0.3")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends; new pods are followed too")
    logs.add_argument("-p", "--previous", action="store_true", help="pods that have a successor, while they exist")
    logs.add_argument("--store", action="store_true", help="the job's store pods instead of its worker pods")
    logs.add_argument("--tail", type=_count, metavar="N", help="last lines of each pod (default: all; with -f: 20)")
    logs.add_argument("--timestamps", action="store_true", help="the time before each line")
    top = _verb(subcommands, "top", "what the pods of a job use, and how fast it trains")
    _add_job(top)
    _add_output(top)
    stacks = _verb(subcommands, "stacks", "where all ranks are now; needs the permission to exec in pods")
    _add_job(stacks)
    stacks.add_argument(
        "--pod", type=_pod, action="append", default=[], metavar="POD", help="only this pod, by name or index"
    )
    stacks.add_argument("--all-threads", action="store_true", help="all threads, and not only the main one")
    _add_output(stacks)
    ui = _verb(subcommands, "ui", "serve a page with all jobs, live, to the browser of this machine")
    ui.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    ui.add_argument("--port", type=_port, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    ui.add_argument("--open", action="store_true", help="open the page in the browser")
    scale = _verb(subcommands, "scale", "change how many worker pods a job trains on")
    _add_job(scale)
    scale.add_argument("replicas", type=_pods, metavar="N", help="worker pods")
    _add_wait(scale)
    suspend = _verb(subcommands, "suspend", "end the pods of a job, so that it can go on later")
    _add_job(suspend)
    _add_wait(suspend)
    resume = _verb(subcommands, "resume", "let a suspended job go on")
    _add_job(resume)
    _add_wait(resume)
    drain = _verb(subcommands, "drain", "let one worker pod leave in good order; the job replaces it")
    drain.add_argument("pod", type=_pod, metavar="POD", help="name of the worker pod")
    drain.add_argument("--force", action="store_true", help="delete the pod if the PodDisruptionBudget refuses")
    _add_wait(drain)


def _add_submit(subcommands: argparse._SubParsersAction[_Parser]) -> None:
    submit = _verb(subcommands, "submit", "run a script on the cluster, without an image build, and follow its logs")
    submit.epilog = (
        "What follows -- are arguments of the script. Exit codes: 0 the job has succeeded (with --detach: it was"
        " created), 1 it has failed or was refused, 64 a flag is wrong, 69 no cluster is reachable, 130 Ctrl-C"
    )
    submit.add_argument("script", metavar="SCRIPT", nargs="?", help="Python file in the folder that is shipped")
    submit.add_argument("--image", metavar="IMAGE", help="image with Python and what the script imports")
    submit.add_argument("--code", metavar="FOLDER", default=".", help="folder that is shipped (default: this one)")
    submit.add_argument("--name", metavar="JOB", help="name of the job (default: the script's, with random characters)")
    submit.add_argument("--pods", type=_count, metavar="N", help="worker pods (default: 1)")
    submit.add_argument("--min-pods", type=_count, metavar="N", help="fewest pods to train on (default: --pods)")
    submit.add_argument("--max-pods", type=_count, metavar="N", help="most pods, for scale (default: --pods)")
    submit.add_argument("--gpus", type=_count, default=0, metavar="N", help="NVIDIA GPUs of each pod (default: 0)")
    submit.add_argument("--workers", type=_count, metavar="N", help="workers of each pod (default: one for each GPU)")
    submit.add_argument("--cpu", default="", metavar="N", help="CPUs that each pod requests, such as 4 or 500m")
    submit.add_argument("--memory", default="", metavar="SIZE", help="memory that each pod may use, such as 16Gi")
    submit.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the pods")
    submit.add_argument(
        "--pvc", action="append", default=[], metavar="CLAIM:PATH[:ro]",
        help="PersistentVolumeClaim that each pod mounts, such as data:/data:ro",
    )  # fmt: skip
    submit.add_argument(
        "--image-pull-secret", action="append", default=[], metavar="NAME", help="Secret to pull the image with"
    )
    submit.add_argument(
        "--update", type=_job, metavar="JOB", help="ship the folder to this running job, in place of its code"
    )
    submit.add_argument("--detach", action="store_true", help="do not follow the job, or wait for its update")
    submit.add_argument("--dry-run", action="store_true", help="print the manifests and create nothing")


def _add_wait(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--wait", action="store_true", help="wait until the job is as wanted, and say what happens")
    verb.add_argument("--timeout", type=_count, metavar="S", help="seconds to --wait (default: 600)")


def _add_job(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("job", type=_job, metavar="JOB", help="name of the job")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"want a number from 0 on, got {text!r}")
    return int(text)


def _pods(text: str) -> int:
    if not 1 <= (number := _count(text)) <= MOST_PODS:
        raise argparse.ArgumentTypeError(f"want a number from 1 to {MOST_PODS}, got {text!r}")
    return number


def _job(text: str) -> str:
    return _name_of("job", "bert", text)


def _pod(text: str) -> str:
    return _name_of("pod", "bert-0-0", text)


def _namespace(text: str) -> str:
    return _name_of("namespace", "team", text) if text else ""  # as for kubectl, the empty one is the context's


def _name_of(kind: str, example: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"want the name of a {kind} (a-z, 0-9 and '-'), such as {example}, got {text!r}"
        )
    return text


def _round(text: str) -> str:
    if not _ROUND.fullmatch(text):
        raise argparse.ArgumentTypeError(f"want a round, such as 3 or 1.0.3, got {text!r}")
    return text


def _port(text: str) -> int:
    if (number := _count(text)) > 65535:
        raise argparse.ArgumentTypeError(f"want a port from 0 to 65535, got {text!r}")
    return number


def _numbers(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _verb(subcommands: argparse._SubParsersAction[_Parser], name: str, text: str) -> argparse.ArgumentParser:
    """Add a verb that talks to a cluster, with kubectl's flags."""
    verb = subcommands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_CODES)
    verb.add_argument(
        "-n", "--namespace", type=_namespace, metavar="NAME", help="namespace (default: that of the context)"
    )
    verb.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    verb.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, then ~/.kube/config")
    return verb


def _add_output(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("-o", "--output", choices=["json", "yaml"], help="for programs (default: text for people)")

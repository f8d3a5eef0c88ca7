"""Run a verb that talks to a cluster, and turn its errors into a line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import time

from elasticjob._runtime.contract.names import Role
from elasticjob.cli.cluster.connection import Cluster, connect_to_cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.views.output import VerbOutput

INTERRUPTED_BY_USER = 130
WAIT_SECONDS = 600


def run_cluster_command(options: argparse.Namespace) -> int:
    """Run the verb that `options.command` names and return the exit code."""
    output = VerbOutput(getattr(options, "output", None))
    try:
        if options.command == "submit":
            return _submit(output, options)
        return _run_verb(_connect(options), output, options)
    except ClusterError as error:
        output.note(f"elasticjob {options.command}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_BY_USER
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would report the error again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _connect(options: argparse.Namespace) -> Cluster:
    return connect_to_cluster(options.kubeconfig, options.context, options.namespace)


def _submit(output: VerbOutput, options: argparse.Namespace) -> int:
    from elasticjob.cli.verbs.submit.submit import NewJob, print_manifests, read_submit, submit_script

    wanted = read_submit(options)  # all mistakes of flags and code show before a cluster is chosen
    if options.dry_run and isinstance(wanted, NewJob):
        return print_manifests(output, wanted)
    return submit_script(_connect(options), output, wanted, detach=options.detach)


def _run_verb(cluster: Cluster, output: VerbOutput, options: argparse.Namespace) -> int:
    now = time.time()
    match options.command:
        case "status" if options.job is None:
            from elasticjob.cli.verbs.status import show_jobs

            return show_jobs(cluster, output, now, all_namespaces=options.all_namespaces)
        case "status":
            from elasticjob.cli.verbs.status import show_status

            return show_status(cluster, output, options.job, now)
        case "events":
            from elasticjob.cli.verbs.events import show_events

            return show_events(cluster, output, options.job, now, warnings=options.warnings, watch=options.watch)
        case "why":
            from elasticjob.cli.verbs.why.why import show_causes

            return show_causes(cluster, output, options.job, now)
        case "logs":
            from elasticjob.cli.verbs.logs.log_lines import LogChoice
            from elasticjob.cli.verbs.logs.logs import PodChoice, show_logs

            lines = LogChoice(options.rank, options.round or "", options.timestamps)
            role = Role.STORE if options.store else Role.WORKER
            pods = PodChoice(options.pod, options.previous, role, options.tail, lines)
            return show_logs(cluster, output, options.job, pods, follow=options.follow)
        case "top":
            from elasticjob.cli.verbs.top import show_usage

            return show_usage(cluster, output, options.job)
        case "stacks":
            from elasticjob.cli.verbs.stacks.stacks import show_stacks

            return show_stacks(cluster, output, options.job, options.pod, all_threads=options.all_threads)
        case "ui":
            from elasticjob.cli.ui.serve import serve_page

            return serve_page(
                cluster, output, all_namespaces=options.all_namespaces, port=options.port, open_browser=options.open
            )
        case "scale":
            from elasticjob.cli.verbs.scale import scale_job

            return scale_job(cluster, output, options.job, options.replicas, _wait_seconds(options))
        case "suspend":
            from elasticjob.cli.verbs.suspend import suspend_job

            return suspend_job(cluster, output, options.job, _wait_seconds(options))
        case "resume":
            from elasticjob.cli.verbs.suspend import resume_job

            return resume_job(cluster, output, options.job, _wait_seconds(options))
        case "drain":
            from elasticjob.cli.verbs.drain import drain_pod

            return drain_pod(cluster, output, options.pod, force=options.force, wait_seconds=_wait_seconds(options))
        case _:
            raise AssertionError(f"{options.command} is not a verb of a cluster")


def _wait_seconds(options: argparse.Namespace) -> float | None:
    return float(WAIT_SECONDS if options.timeout is None else options.timeout) if options.wait else None

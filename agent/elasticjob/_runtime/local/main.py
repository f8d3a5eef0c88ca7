"""Entry point of `elasticjob run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial

from elasticjob._runtime.contract.names import ExitCode
from elasticjob._runtime.local.local_run import LocalRun
from elasticjob._runtime.local.manifest.manifest import LocalJob, ManifestError, load_manifest, parse_local_job
from elasticjob._runtime.local.manifest.program_check import find_missing_program
from elasticjob._runtime.local.processes.child_processes import command_environment, local_command
from elasticjob._runtime.system.daemon_threads import run_without_joining


def main(path: str, *, nodes: int | None = None) -> int:
    """Run the job in a manifest to its end and return the exit code. `nodes` replaces spec.replicas."""
    try:
        job = parse_local_job(load_manifest(path), nodes=nodes)
    except ManifestError as error:
        print(f"elasticjob run: {error}", file=sys.stderr)
        return ExitCode.USAGE
    if problem := find_missing_program(local_command(job), command_environment(job), job.working_dir):
        print(
            f"elasticjob run: {problem}; the job uses this machine's files, and not those of its image (the trainer's"
            f" command: {shlex.join(job.command)})",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    return run_without_joining(_run(job))


async def _run(job: LocalJob) -> int:
    """Run with a live table on a terminal, and with plain lines elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        return await LocalRun(job).run()
    try:
        from elasticjob._runtime.local.terminal.live_table import LiveTable
    except ImportError:
        print("[job] install 'elasticjob[cli]' to see a live table here", file=sys.stderr)
        return await LocalRun(job).run()
    screen = LiveTable()
    run = LocalRun(job, screen)
    try:
        screen.listen(_keys(run))
        return await run.run()
    finally:
        screen.close()


def _keys(run: LocalRun) -> dict[str, Callable[[], None]]:
    kills = {str(index): partial(run.kill, index) for index in range(10)}
    return {
        **kills,
        "s": run.kill_store,
        "+": lambda: run.scale(run.target + run.increment),
        "-": lambda: run.scale(run.target - run.increment),
    }

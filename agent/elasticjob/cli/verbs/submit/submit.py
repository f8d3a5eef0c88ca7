"""`elasticjob submit`: run a script on the cluster without an image build, and follow its logs."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticjob._runtime.contract.shipped_code import CODE_FOLDER
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.resources import ELASTICJOBS, KubeObject
from elasticjob.cli.shipping.archive import CodeArchive, pack_folder
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.flag_values import parse_claims, parse_env, parse_names
from elasticjob.cli.shipping.job_request import JobRequest, job_name
from elasticjob.cli.verbs.submit.code_update import update_code
from elasticjob.cli.verbs.submit.creation import checked_objects, create_objects
from elasticjob.cli.verbs.submit.follow import follow_job
from elasticjob.cli.views.output import VerbOutput

INTERRUPTED_BY_USER = 130
UPDATE_SECONDS = 180.0
"""How long `--update` waits until the job trains with the new code."""
_QUESTION = "\n{name} goes on. [d]etach and let it run, [c]ancel and delete it, or Enter to follow it further? "


@dataclass(frozen=True)
class NewJob:
    """A job to create, with the ConfigMap of its code."""

    manifest: KubeObject
    code: KubeObject
    summary: str
    """What is shipped, in words."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True)
class NewCode:
    """Other code for a job that runs."""

    job: str
    archive: CodeArchive


def read_submit(options: argparse.Namespace) -> NewJob | NewCode:
    """Read and check all flags and the code, without a cluster. SubmitError: something is wrong with them."""
    root = _existing(options.code)
    if options.update:
        return NewCode(options.update, pack_folder(root))
    script = script_in(root, options.script)
    request = JobRequest(
        name=options.name or job_name(script, random_suffix()),
        image=options.image,
        command=("python3", script, *options.arguments),
        pods=1 if options.pods is None else options.pods,
        min_pods=options.min_pods,
        max_pods=options.max_pods,
        gpus=options.gpus,
        workers=options.workers,
        cpu=options.cpu,
        memory=options.memory,
        env=parse_env(options.env),
        image_pull_secrets=parse_names("--image-pull-secret", options.image_pull_secret),
        claims=parse_claims(options.pvc),
        namespace=options.namespace or "",
    )
    archive = pack_folder(root)
    return NewJob(*checked_objects(request, archive), archive.summary())


def print_manifests(output: VerbOutput, job: NewJob) -> int:
    """Write the ConfigMap and the job as YAML; return the exit code."""
    import yaml

    output.line(str(yaml.safe_dump_all([job.code, job.manifest], sort_keys=False, width=120)).rstrip("\n"))
    return 0


def submit_script(cluster: Cluster, output: VerbOutput, wanted: NewJob | NewCode, *, detach: bool) -> int:
    """Create the job and follow it; return the exit code, which is the job's. For NewCode: ship it."""
    if isinstance(wanted, NewCode):
        return update_code(cluster, output, wanted.job, wanted.archive, None if detach else UPDATE_SECONDS)
    create_objects(cluster, wanted.manifest, wanted.code)
    output.note(f"{wanted.name} is created in namespace {cluster.namespace}; its code: {wanted.summary}")
    if detach:
        output.line(wanted.name)
        output.note(_how_to_go_on(wanted.name))
        return 0
    return follow_until_interrupted(cluster, output, wanted.name, ask_user if has_terminal() else None)


def _existing(folder: str) -> Path:
    root = Path(folder).resolve()
    if not root.is_dir():
        raise SubmitError(f"--code {root}: there is no such folder")
    return root


def script_in(root: Path, script: str) -> str:
    """Return the path of the script relative to the folder that is shipped. SubmitError: it is not in there."""
    # Of a path that exists both from here and from the root, the one from here is meant, as the shell completes it.
    path = next((p.resolve() for p in (Path(script), root / script) if p.is_file()), None)
    if path is None:
        raise SubmitError(f"{script}: there is no such file")
    if not path.is_relative_to(root):
        raise SubmitError(f"{path} is not in {root}, which is shipped: choose its folder with --code")
    return path.relative_to(root).as_posix()


def follow_until_interrupted(cluster: Cluster, output: VerbOutput, name: str, ask: Callable[[str], str] | None) -> int:
    """Follow the job until it ends or Ctrl-C; return the exit code.

    `ask`: asks what to do at Ctrl-C and returns the answer; None: there is nobody to ask, and the job goes on.
    """

    def interrupted() -> int | None:
        answer = ask(_QUESTION.format(name=name)).strip().lower()[:1] if ask else "d"
        if answer == "c":
            cluster.delete(ELASTICJOBS, name)
            output.note(f"{name} is cancelled: it is deleted with its pods and its code")
            return INTERRUPTED_BY_USER
        if answer == "d":
            output.note(_how_to_go_on(name))
            return INTERRUPTED_BY_USER
        return None

    return follow_job(cluster, output, name, interrupted)


def _how_to_go_on(name: str) -> str:
    return (
        f"{name} goes on without this terminal: elasticjob logs {name} -f follows it, elasticjob status {name} shows"
        f" it, kubectl delete ej {name} ends it; its files are in {CODE_FOLDER} of each pod"
    )


def ask_user(question: str) -> str:
    """Return the answer; a second Ctrl-C, or the end of the input, detaches."""
    try:
        sys.stderr.write(question)
        sys.stderr.flush()
        return sys.stdin.readline() or "d"
    except KeyboardInterrupt:
        return "d"


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def random_suffix() -> str:
    """Return characters that make a name unique."""
    return "".join(secrets.choice("abcdefghijkmnpqrstuvwxyz23456789") for _ in range(5))

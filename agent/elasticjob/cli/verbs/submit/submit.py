"""`elasticjob submit`: run a script on the cluster without an image build, and follow its logs."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from elasticjob._runtime.contract.shipped_code import CODE_FOLDER
from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.resources import ELASTICJOBS
from elasticjob.cli.shipping.archive import CodeArchive, pack_folder
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.job_request import JobRequest, code_object, job_name, parse_claims, parse_env, parse_names
from elasticjob.cli.verbs.submit.code_update import update_code
from elasticjob.cli.verbs.submit.creation import checked_manifest, create_job
from elasticjob.cli.verbs.submit.follow import follow_job
from elasticjob.cli.views.output import VerbOutput

INTERRUPTED_BY_USER = 130
UPDATE_SECONDS = 180.0
"""How long `--update` waits until the job trains with the new code."""
_QUESTION = "\n{name} goes on. [d]etach and let it run, [c]ancel and delete it, or Enter to follow it further? "


def print_manifests(output: VerbOutput, options: argparse.Namespace) -> int:
    """Write the ConfigMap and the job as YAML, without a cluster; return the exit code."""
    import yaml

    archive, request = read_request(options)
    documents = [code_object(request, archive), checked_manifest(request, archive)]
    output.line(str(yaml.safe_dump_all(documents, sort_keys=False, width=120)).rstrip("\n"))
    return 0


def submit_script(cluster: Cluster, output: VerbOutput, options: argparse.Namespace) -> int:
    """Create the job and follow it; return the exit code, which is the job's. With `--update`: ship other code."""
    if options.update:
        wait_seconds = None if options.detach else UPDATE_SECONDS
        return update_code(cluster, output, options.update, pack_folder(_existing(options.code)), wait_seconds)
    archive, request = read_request(options)
    create_job(cluster, request, archive)
    output.note(f"{request.name} is created in namespace {cluster.namespace}; its code: {archive.summary()}")
    if options.detach:
        output.line(request.name)
        output.note(_how_to_go_on(request.name))
        return 0
    return follow_until_interrupted(cluster, output, request.name, ask_user if has_terminal() else None)


def read_request(options: argparse.Namespace) -> tuple[CodeArchive, JobRequest]:
    """Pack the code and read the flags. SubmitError: something is wrong with them."""
    if not (options.script and options.image):
        raise SubmitError("say which SCRIPT to run and in which --image, or which job to --update")
    root = _existing(options.code)
    script = script_in(root, options.script)
    request = JobRequest(
        name=options.name or job_name(script, random_suffix()),
        image=options.image,
        command=("python3", script, *options.arguments),
        pods=options.pods,
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
    return pack_folder(root), request


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

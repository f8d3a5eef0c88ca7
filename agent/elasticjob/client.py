"""Jobs from Python or a notebook: submit a script or a function, then wait for it, read, scale or cancel it.

This is `elasticjob submit` and the other verbs as functions. It needs the `cli` extra.
Each function that talks to a cluster raises ClusterError, whose text is one sentence, if a request fails.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from elasticjob._runtime.contract.names import Role
from elasticjob.cli.cluster.connection import Cluster, connect_to_cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.cluster.resources import ELASTICJOBS, POD_LIST
from elasticjob.cli.objects.jobs import has_finished, is_true, job_condition
from elasticjob.cli.objects.pods import pods_selector
from elasticjob.cli.objects.waiting import NotInTimeError, wait_for_job
from elasticjob.cli.shipping.archive import pack_folder
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.flag_values import parse_claims, parse_names
from elasticjob.cli.shipping.functions import function_call
from elasticjob.cli.shipping.job_request import JobRequest, job_name
from elasticjob.cli.verbs.logs.log_lines import LogChoice
from elasticjob.cli.verbs.logs.logs import PodChoice, show_logs
from elasticjob.cli.verbs.scale import scale_job
from elasticjob.cli.verbs.status import job_overview
from elasticjob.cli.verbs.submit.code_update import update_code
from elasticjob.cli.verbs.submit.creation import checked_objects, create_objects
from elasticjob.cli.verbs.submit.follow import follow_job
from elasticjob.cli.verbs.submit.submit import random_suffix, script_in
from elasticjob.cli.views.output import VerbOutput

_FLAG = re.compile(
    r"--(name|image-pull-secret|image|code|pods|min-pods|max-pods|gpus|workers|cpu|memory|env|pvc)(?![\w-])"
)

__all__ = ["ClusterError", "JobFailedError", "SubmitError", "SubmittedJob", "find", "submit"]


class JobFailedError(Exception):
    """The job has failed. The text says why; `status` is what `SubmittedJob.status` returned at its end.

    Example:
        >>> raise JobFailedError("bert has failed: OOMKilled", {"phase": "Failed"})
        Traceback (most recent call last):
        elasticjob.client.JobFailedError: bert has failed: OOMKilled
    """

    def __init__(self, text: str, status: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class SubmittedJob:
    """A job on the cluster. `submit` and `find` return one.

    Example:
        >>> job = find("bert")
        >>> job.scale(3)
        >>> job.status()["phase"]
        'Running'
        >>> print(job.logs(rank=0, tail=1))
        [default0]:step 7
    """

    name: str
    namespace: str
    cluster: Cluster = field(repr=False, compare=False)

    def status(self) -> dict[str, Any]:
        """Return what `elasticjob status -o json` shows, without Events and ranks.

        Returns:
            Among others: phase, training (worker pods that train), wanted, worldSize, restarts, progress, conditions,
            pods and failures. What has no value is left out.

        Raises:
            ClusterError: there is no such job, or it may not be read.
        """
        job = self.cluster.get(ELASTICJOBS, self.name)
        return job_overview(job, self.cluster.list(POD_LIST, pods_selector(self.name)), [], {})

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the job has ended, and return its status.

        Args:
            timeout: seconds to wait at most; None: without a limit.

        Returns:
            The `status` of the job, which has succeeded.

        Raises:
            JobFailedError: the job has failed.
            TimeoutError: it has not ended in time.
            ClusterError: it was deleted, or may not be read.
        """
        quiet = VerbOutput(None, io.StringIO(), io.StringIO())
        seconds = math.inf if timeout is None else timeout
        try:
            wait_for_job(self.cluster, quiet, self.name, has_finished, what=f"{self.name} has ended", seconds=seconds)
        except NotInTimeError as error:
            raise TimeoutError(str(error)) from None
        job = self.cluster.get(ELASTICJOBS, self.name)
        if is_true(job, "Failed"):
            message = " ".join(str(job_condition(job, "Failed").get("message", "")).split())
            raise JobFailedError(f"{self.name} has failed: {message}", self.status())
        return self.status()

    def logs(self, rank: int | None = None, tail: int | None = None) -> str:
        """Return what the worker pods have logged so far, pod by pod.

        Args:
            rank: only lines of this rank; None: of all ranks, and of the agents.
            tail: last lines of each pod; None: all that the kubelets keep.

        Returns:
            The lines. Empty if no pod has started.

        Raises:
            ClusterError: there is no such job, or it may not be read.
        """
        text = io.StringIO()
        choice = PodChoice(tail=tail, lines=LogChoice([] if rank is None else [rank]), role=Role.WORKER)
        show_logs(self.cluster, VerbOutput(None, text, io.StringIO()), self.name, choice, follow=False)
        return text.getvalue().rstrip("\n")

    def follow(self, stream: TextIO | None = None) -> bool:
        """Write the logs and the progress until the job ends. An interrupt (Ctrl-C) ends only this call.

        Args:
            stream: where to write; None: to standard output.

        Returns:
            Whether the job has succeeded.

        Raises:
            ClusterError: the pods may not be read.
            KeyboardInterrupt: at Ctrl-C; the job goes on.
        """
        target = sys.stdout if stream is None else stream

        def interrupted() -> int | None:
            raise KeyboardInterrupt

        return follow_job(self.cluster, VerbOutput(None, target, target), self.name, interrupted) == 0

    def scale(self, pods: int) -> None:
        """Ask for another number of worker pods, as `elasticjob scale` does.

        Args:
            pods: worker pods to train on.

        Raises:
            ClusterError: the job has ended, or its elasticPolicy does not allow this size.
        """
        scale_job(self.cluster, VerbOutput(None, io.StringIO(), io.StringIO()), self.name, pods, None)

    def update(self, code: str | Path = ".", timeout: float | None = 180.0) -> None:
        """Ship a folder to the running job in place of its code, and restart its workers without new pods.

        Args:
            code: the folder.
            timeout: seconds to wait until the job trains with it; None: do not wait.

        Raises:
            SubmitError: the code is too large, or the job was not submitted by `submit`, or has ended.
            ClusterError: the job does not train with it in time.
        """
        quiet = VerbOutput(None, io.StringIO(), io.StringIO())
        update_code(self.cluster, quiet, self.name, pack_folder(Path(code).resolve()), timeout)

    def cancel(self) -> None:
        """Delete the job with its pods and its code.

        Raises:
            ClusterError: there is no such job, or it may not be deleted.
        """
        self.cluster.delete(ELASTICJOBS, self.name)


def find(
    name: str, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
) -> SubmittedJob:
    """Return a job that exists already.

    Args:
        name: name of the job.
        namespace: its namespace; None: that of the context.
        context: context of the kubeconfig; None: the current one.
        kubeconfig: its path; None: as kubectl finds it.

    Raises:
        ClusterError: there is no such job, or no cluster.

    Example:
        >>> find("bert").namespace
        'team'
    """
    cluster = connect_to_cluster(kubeconfig, context, namespace)
    cluster.get(ELASTICJOBS, name)
    return SubmittedJob(name, cluster.namespace, cluster)


def submit(
    program: str | Callable[..., Any],
    arguments: Sequence[str] | Mapping[str, Any] = (),
    *,
    image: str,
    name: str | None = None,
    pods: int = 1,
    min_pods: int | None = None,
    max_pods: int | None = None,
    gpus: int = 0,
    workers: int | None = None,
    cpu: str = "",
    memory: str = "",
    env: Mapping[str, str] | None = None,
    pvc: str | Sequence[str] = (),
    image_pull_secret: str | Sequence[str] = (),
    code: str | Path | None = None,
    namespace: str | None = None,
    context: str | None = None,
    kubeconfig: str | None = None,
) -> SubmittedJob:
    """Ship a folder and run a script of it, or a function of a module in it, on the cluster.

    Nothing is pickled: a pod imports the function from its module, so it must be at the top of a file. A function of a
    notebook has none; write it to a file with `%%writefile` and import it from there. The pods import the module of a
    function of a script as well: put what the script itself does behind `if __name__ == "__main__":`.

    Args:
        program: path of a script, or a function.
        arguments: of a script, its arguments; of a function, its keyword arguments, which must be JSON values.
        image: an image with Python and what the code imports.
        name: name of the job; None: that of the script or function, with random characters.
        pods: worker pods to train on.
        min_pods: fewest worker pods to train on; None: `pods`.
        max_pods: most worker pods, for `SubmittedJob.scale`; None: `pods`.
        gpus: NVIDIA GPUs of each pod.
        workers: workers of each pod; None: one for each GPU, or one.
        cpu: CPUs that each pod requests, such as `4` or `500m`.
        memory: memory that each pod may use, such as `16Gi`.
        env: variables of the pods.
        pvc: PersistentVolumeClaims that each pod mounts, as `CLAIM:PATH`, or `CLAIM:PATH:ro` to mount one read-only.
        image_pull_secret: Secrets of the namespace with which the images are pulled.
        code: the folder to ship; None: the current folder for a script, the folder of its top package for a function.
        namespace: namespace of the job; None: that of the context.
        context: context of the kubeconfig; None: the current one.
        kubeconfig: its path; None: as kubectl finds it.

    Returns:
        The job, which may not have pods yet.

    Raises:
        SubmitError: the function has no file, the code is too large, an argument is wrong, or there is a job of this
            name.
        ClusterError: no cluster is reachable, or the API server refuses.

    Example:
        >>> job = submit("train.py", ["--lr", "0.1"], image="torch:2.6", pods=2, name="digits")
        >>> job.wait()["phase"]
        'Succeeded'
    """
    with _errors_about_arguments():
        root, command, base = _what_runs(program, arguments, code)
        request = JobRequest(
            name or job_name(base, random_suffix()), image, command, pods, min_pods, max_pods, gpus, workers, cpu,
            memory, dict(env or {}), parse_names("--image-pull-secret", _texts(image_pull_secret)),
            parse_claims(_texts(pvc)),
        )  # fmt: skip
        manifest, code_object = checked_objects(request, pack_folder(root))
        cluster = connect_to_cluster(kubeconfig, context, namespace)
        create_objects(cluster, manifest, code_object)
    return SubmittedJob(request.name, cluster.namespace, cluster)


@contextlib.contextmanager
def _errors_about_arguments() -> Iterator[None]:
    """Let errors name the arguments of `submit`, and not the flags of the command line."""
    try:
        yield
    except SubmitError as error:
        text = _FLAG.sub(lambda found: found[1].replace("-", "_"), str(error))
        raise type(error)(text) from None


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _what_runs(
    program: str | Callable[..., Any], arguments: Sequence[str] | Mapping[str, Any], code: str | Path | None
) -> tuple[Path, tuple[str, ...], str]:
    """Return the folder to ship, the command of the pods, and the name of the script or function; SubmitError."""
    if callable(program):
        call = function_call(program, arguments if isinstance(arguments, Mapping) else _no_arguments(arguments))
        root = _root(code, call.root)
        if root != call.root:
            raise SubmitError(f"{call.name} is imported from {call.root}: leave out code, or choose that folder")
        return root, call.command, call.name
    if isinstance(arguments, (str, Mapping)):
        raise SubmitError(f"the arguments of a script are a list of texts, and not {arguments!r}")
    root = _root(code, Path.cwd())
    script = script_in(root, program)
    return root, ("python3", script, *map(str, arguments)), script


def _root(code: str | Path | None, default: Path) -> Path:
    return Path(default if code is None else code).resolve()


def _no_arguments(arguments: Sequence[str]) -> Mapping[str, Any]:
    if arguments:
        raise SubmitError(f"the arguments of a function are a dict of keyword arguments, and not {arguments!r}")
    return {}

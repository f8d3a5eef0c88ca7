"""Read and check what a user asks of `submit`, before anything is sent. Each error says what to write instead. Pure.

The API server would find most of it too, but late and in the words of the manifest, which the user has not written.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping

from elasticjob._runtime.contract.commands.reserved_variables import is_reserved_variable
from elasticjob._runtime.contract.commands.worker_count import MAX_WORKERS
from elasticjob._runtime.contract.shipped_code import CODE_FOLDER
from elasticjob.cli.arguments import MOST_PODS
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.shipping.job_request import ClaimMount, JobRequest

LONGEST_NAME = 253
LONGEST_JOB_NAME = 50
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(
    r"(([a-zA-Z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?/)?"  # registry
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127})?(@[a-zA-Z0-9+._-]+:[0-9a-fA-F]{32,})?"
)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_CPU = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)m?")
_MEMORY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[kMGTPE])?")
"""Kubernetes also takes `m`: 512m are half a byte, and never what a user means."""


def check_request(request: JobRequest) -> None:
    """Raise SubmitError for the first value that no job can have."""
    name = request.name
    if len(name) > LONGEST_JOB_NAME or not _JOB_NAME.fullmatch(name):
        raise SubmitError(
            f"--name {name}: want a letter, then a-z, 0-9 and '-', at most {LONGEST_JOB_NAME} in all, as in bert-1"
        )
    if not _IMAGE.fullmatch(request.image):
        raise SubmitError(f"--image {request.image}: want an image, as in registry.example.com/torch:2.6")
    for flag, pods in (("--pods", request.pods), ("--min-pods", request.min_pods), ("--max-pods", request.max_pods)):
        if pods is not None and not 1 <= pods <= MOST_PODS:
            raise SubmitError(f"{flag} {pods}: want a number from 1 to {MOST_PODS}")
    _check_workers(request)
    if request.cpu and not _CPU.fullmatch(request.cpu):
        raise SubmitError(f"--cpu {request.cpu}: want a number of CPUs, as in 4 or 500m")
    if request.memory and not _MEMORY.fullmatch(request.memory):
        raise SubmitError(f"--memory {request.memory}: want a size, as in 16Gi or 500Mi")
    _check_env(request.env)


def _check_workers(request: JobRequest) -> None:
    if request.gpus < 0:
        raise SubmitError(f"--gpus {request.gpus}: want a number from 0 on")
    if request.workers is not None and not 1 <= request.workers <= MAX_WORKERS:
        raise SubmitError(f"--workers {request.workers}: want a number from 1 to {MAX_WORKERS}")
    if request.workers is None and request.gpus > MAX_WORKERS:
        raise SubmitError(
            f"--gpus {request.gpus}: a pod has at most {MAX_WORKERS} workers, one for each GPU: ask for fewer GPUs,"
            " or for fewer workers with --workers"
        )


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise SubmitError(f"--env {name}: want a name of letters, digits, '_', '-' and '.', as in LOG_LEVEL")
        if is_reserved_variable(name):
            raise SubmitError(f"--env {name}: leave it out, elasticjob sets it for each worker")
        if not isinstance(value, str):
            raise SubmitError(f"--env {name}: want a text, as in {str(value)!r}, and not {value!r}")


def parse_env(pairs: Iterable[str]) -> dict[str, str]:
    """Return the variables of `NAME=VALUE` texts. SubmitError: one is none, or two have one name."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise SubmitError(f"--env {pair}: want NAME=VALUE, as in LOG_LEVEL=debug")
        if name in found:
            raise SubmitError(f"--env {pair}: {name} has the value {found[name]!r} already; leave out one of them")
        found[name] = value
    return found


def parse_names(flag: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names of objects of the namespace, each once. SubmitError: Kubernetes does not take one of them."""
    for name in (found := tuple(dict.fromkeys(names))):
        _check_name(flag, name, name)
    return found


def parse_claims(texts: Iterable[str]) -> tuple[ClaimMount, ...]:
    """Return the mounts of `CLAIM:/path` and `CLAIM:/path:ro` texts. SubmitError: one is none, or two have one path."""
    found: dict[str, ClaimMount] = {}
    for text in texts:
        claim, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        if not path.startswith("/") or mode not in ("", "ro", "rw"):
            raise SubmitError(f"--pvc {text}: want CLAIM:/path, or CLAIM:/path:ro to mount it read-only")
        _check_name("--pvc", text, claim)
        path = posixpath.normpath(path)
        if path in ("/", "//") or f"{path}/".startswith(f"{posixpath.dirname(CODE_FOLDER)}/"):
            raise SubmitError(f"--pvc {text}: {path} is needed for the container's own files; mount it elsewhere")
        if path in found:
            raise SubmitError(f"--pvc {text}: {path} has the claim {found[path].claim} already; mount it elsewhere")
        found[path] = ClaimMount(claim, path, mode == "ro")
    return tuple(found.values())


def _check_name(flag: str, text: str, name: str) -> None:
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise SubmitError(f"{flag} {text}: {name!r} is no name of an object: want a-z, 0-9, '-' and '.', as in my-data")

"""Entry point of `elasticjob convert`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from elasticjob._runtime.contract.names import KIND, VERSION
from elasticjob.convert.documents import Document, read_documents
from elasticjob.convert.kinds.api_versions import V1ALPHA1
from elasticjob.convert.kinds.elasticjob import ELASTICJOB_VERSIONS, convert_elasticjob, in_v1beta1
from elasticjob.convert.kinds.hyperpod import HYPERPOD_KIND, HYPERPOD_VERSION, convert_hyperpod_job
from elasticjob.convert.kinds.jobset import JOBSET_KIND, JOBSET_VERSIONS, convert_jobset
from elasticjob.convert.kinds.pytorchjob import PYTORCHJOB_VERSION, convert_pytorchjob
from elasticjob.convert.kinds.trainjob import RUNTIME_KINDS, TRAINJOB_VERSION, convert_trainjob
from elasticjob.convert.parts.fields import ConvertError, JsonObject, Notes
from elasticjob.convert.yaml_text import manifest_text

_BAD_INPUT = 2
_HAS_NOTES = 1
_VERSIONS = {
    "PyTorchJob": (PYTORCHJOB_VERSION,),
    "TrainJob": (TRAINJOB_VERSION,),
    HYPERPOD_KIND: (HYPERPOD_VERSION,),
    JOBSET_KIND: JOBSET_VERSIONS,
}
_PREVIEW = "elasticjob convert: v1beta1 is a preview that no cluster serves yet: apply the manifest in v1alpha1"


def main(paths: Sequence[str], *, output: str | None = None, strict: bool = False, version: str = VERSION) -> int:
    """Convert the jobs in YAML files and return the exit code. Nothing is written unless all jobs are converted.

    `output`: file for the result; by default it is printed. `strict`: write nothing if there is a note. `version`: that
    of the ElasticJobs in the result, `v1alpha1` or `v1beta1`.
    """
    try:
        documents = [document for path in paths for document in read_documents(path)]
        manifests, notes = convert_documents(documents, ", ".join(paths), version)
    except ConvertError as error:
        print(f"elasticjob convert: {error}", file=sys.stderr)
        return _BAD_INPUT
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if strict and notes:
        print("elasticjob convert: there are notes: with --strict nothing is written", file=sys.stderr)
        return _HAS_NOTES
    if ELASTICJOB_VERSIONS[version] != V1ALPHA1:
        print(_PREVIEW, file=sys.stderr)
    return _write(manifest_text(manifests), output)


def _write(text: str, output: str | None) -> int:
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"elasticjob convert: {output}: {error.strerror}", file=sys.stderr)
        return _BAD_INPUT
    return 0


def convert_documents(
    documents: Sequence[Document], sources: str, version: str = VERSION
) -> tuple[list[JsonObject], list[str]]:
    """Return the manifests and the notes. ConvertError names all jobs that cannot be converted.

    `sources`: names of the input, for a message. `version`: that of the ElasticJobs in the result.
    """
    jobs = [document for document in documents if _is_converted(document, version)]
    if not jobs:
        found = ", ".join(document.title for document in documents) or "nothing"
        wanted = ", ".join(_VERSIONS)
        raise ConvertError(f"{sources}: want a {wanted}, found {found}{_hint(documents, version)}")
    runtimes = [document.content for document in documents if document.kind in RUNTIME_KINDS]
    manifests: list[JsonObject] = []
    lines: list[str] = []
    errors: list[str] = []
    for document in documents:
        notes = Notes()
        if document in jobs:
            try:
                manifests += _convert_job(document, runtimes, notes, version)
            except ConvertError as error:
                errors.append(f"{document.source}: {document.title}: {error}")
        elif document.kind not in RUNTIME_KINDS:
            lines.append(f"{document.source}: {document.title} is not converted: apply it as it is")
        lines += [f"{document.title}: {note}" for note in notes.items]
    if errors:
        raise ConvertError("\n".join(errors))
    return manifests, lines


def _is_converted(document: Document, version: str) -> bool:
    """Return whether the document is a job that the result does not have as it is."""
    if document.kind == KIND:
        return document.content.get("apiVersion") != ELASTICJOB_VERSIONS[version]
    return document.kind in _VERSIONS


def _hint(documents: Sequence[Document], version: str) -> str:
    if not any(document.kind == KIND for document in documents):
        return ""
    others = " or ".join(name for name in ELASTICJOB_VERSIONS if name != version)
    return f", which is in {version} already: --to {others} converts an ElasticJob to another version of the API"


def _convert_job(document: Document, runtimes: Sequence[JsonObject], notes: Notes, version: str) -> list[JsonObject]:
    if document.kind == KIND:
        return [convert_elasticjob(document.content, version, notes)]
    converted = _convert_foreign(document, runtimes, notes)
    if ELASTICJOB_VERSIONS[version] == V1ALPHA1:
        return converted
    return [in_v1beta1(manifest) if manifest["kind"] == KIND else manifest for manifest in converted]


def _convert_foreign(document: Document, runtimes: Sequence[JsonObject], notes: Notes) -> list[JsonObject]:
    wanted = _VERSIONS[document.kind]
    if (version := document.content.get("apiVersion")) not in wanted:
        raise ConvertError(f"apiVersion: want {' or '.join(wanted)}, got {version!r}")
    if document.kind == "TrainJob":
        return convert_trainjob(document.content, runtimes, notes)
    if document.kind == HYPERPOD_KIND:
        return convert_hyperpod_job(document.content, notes)
    if document.kind == JOBSET_KIND:
        return convert_jobset(document.content, notes)
    return convert_pytorchjob(document.content, notes)

"""Entry point of `elasticjob convert`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from elasticjob.convert.documents import Document, read_documents
from elasticjob.convert.fields import ConvertError, JsonObject, Notes
from elasticjob.convert.pytorchjob import PYTORCHJOB_VERSION, convert_pytorchjob
from elasticjob.convert.trainjob import RUNTIME_KINDS, TRAINJOB_VERSION, convert_trainjob
from elasticjob.convert.yaml_text import manifest_text

_BAD_INPUT = 2
_HAS_NOTES = 1
_VERSIONS = {"PyTorchJob": PYTORCHJOB_VERSION, "TrainJob": TRAINJOB_VERSION}


def main(paths: Sequence[str], *, output: str | None = None, strict: bool = False) -> int:
    """Convert the jobs in YAML files and return the exit code. Nothing is written unless all jobs are converted.

    `output`: file for the result; by default it is printed. `strict`: write nothing if there is a note.
    """
    try:
        documents = [document for path in paths for document in read_documents(path)]
        manifests, notes = convert_documents(documents, ", ".join(paths))
    except ConvertError as error:
        print(f"elasticjob convert: {error}", file=sys.stderr)
        return _BAD_INPUT
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if strict and notes:
        print("elasticjob convert: there are notes: with --strict nothing is written", file=sys.stderr)
        return _HAS_NOTES
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


def convert_documents(documents: Sequence[Document], sources: str) -> tuple[list[JsonObject], list[str]]:
    """Return the manifests and the notes. ConvertError names all jobs that cannot be converted.

    `sources`: names of the input, for a message.
    """
    jobs = [document for document in documents if document.kind in _VERSIONS]
    if not jobs:
        found = ", ".join(document.title for document in documents) or "nothing"
        raise ConvertError(f"{sources}: want a PyTorchJob or a TrainJob, found {found}")
    runtimes = [document.content for document in documents if document.kind in RUNTIME_KINDS]
    manifests: list[JsonObject] = []
    lines: list[str] = []
    errors: list[str] = []
    for document in documents:
        notes = Notes()
        if document in jobs:
            try:
                manifests += _convert_job(document, runtimes, notes)
            except ConvertError as error:
                errors.append(f"{document.source}: {document.title}: {error}")
        elif document.kind not in RUNTIME_KINDS:
            lines.append(f"{document.source}: {document.title} is not converted: apply it as it is")
        lines += [f"{document.title}: {note}" for note in notes.items]
    if errors:
        raise ConvertError("\n".join(errors))
    return manifests, lines


def _convert_job(document: Document, runtimes: Sequence[JsonObject], notes: Notes) -> list[JsonObject]:
    wanted = _VERSIONS[document.kind]
    if (version := document.content.get("apiVersion")) != wanted:
        raise ConvertError(f"apiVersion: want {wanted}, got {version!r}")
    if document.kind == "TrainJob":
        return convert_trainjob(document.content, runtimes, notes)
    return convert_pytorchjob(document.content, notes)

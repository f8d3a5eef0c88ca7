"""`elasticjob validate`: what the API server would say about manifests, without asking it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticjob._runtime.contract.names import GROUP, KIND, VERSION
from elasticjob._runtime.local.manifest.job_schema import find_problems
from elasticjob._runtime.local.manifest.manifest_yaml import ManifestYamlError, read_yaml_documents
from elasticjob.cli.views.output import VerbOutput


def validate_manifests(output: VerbOutput, files: Sequence[str]) -> int:
    """Say what is wrong with each ElasticJob in the files; return 1 if anything is. `-` is standard input."""
    found = [problem for file in files for problem in _problems_of_file(file)]
    for problem in found:
        output.note(f"elasticjob validate: {problem}")
    if not found:
        output.line(f"{', '.join(files)}: every ElasticJob is valid")
    return int(bool(found))


def _problems_of_file(file: str) -> Iterator[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = read_yaml_documents(text)
    except ImportError:
        yield "PyYAML is missing: pip install pyyaml"
        return
    except OSError as error:
        yield f"{file}: {error.strerror}"
        return
    except (UnicodeDecodeError, ManifestYamlError) as error:
        yield f"{file}: {error}"
        return
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if not jobs:
        yield f"{file}: has no {KIND}"
    for job in jobs:
        yield from (f"{file}: {_name(job)}: {problem}" for problem in _problems_of_job(job))


def _problems_of_job(job: dict[str, Any]) -> list[str]:
    if (version := job.get("apiVersion")) != f"{GROUP}/{VERSION}":
        return [f"apiVersion: want {GROUP}/{VERSION}, got {version!r}"]
    return find_problems(job)


def _name(job: dict[str, Any]) -> str:
    metadata = job.get("metadata")
    return str(metadata.get("name") or "without a name") if isinstance(metadata, dict) else "without a name"

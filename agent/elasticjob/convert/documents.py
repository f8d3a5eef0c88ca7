"""Read the input of `elasticjob convert`: YAML files and standard input, lists, and several documents in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob._runtime.local.manifest.manifest_yaml import ManifestYamlError, read_yaml_documents
from elasticjob.convert.parts.fields import ConvertError, JsonObject, without_nulls

STDIN = "-"


@dataclass(frozen=True)
class Document:
    """An object of the input."""

    source: str
    """Name of its file."""
    content: JsonObject

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "object without a kind"))

    @property
    def title(self) -> str:
        metadata = self.content.get("metadata")
        names = metadata if isinstance(metadata, dict) else {}
        return f"{self.kind} {names.get('name') or names.get('generateName') or 'without a name'}"


def read_documents(path: str) -> list[Document]:
    """Return the objects in a file, `-` for standard input. ConvertError: it cannot be read, or is not YAML."""
    source = "standard input" if path == STDIN else path
    try:
        text = sys.stdin.read() if path == STDIN else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConvertError(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConvertError(f"{source}: is not YAML: it is not text in UTF-8") from None
    return parse_documents(text, source)


def parse_documents(text: str, source: str) -> list[Document]:
    """Return the objects in YAML text, those of lists one by one, without null fields. ConvertError: as above."""
    try:
        values = read_yaml_documents(text)
    except ImportError:
        raise ConvertError("PyYAML is missing: pip install pyyaml") from None
    except ManifestYamlError as error:
        raise ConvertError(f"{source}: {error}") from None
    return [Document(source, content) for value in values for content in _objects(value, source)]


def _objects(value: Any, source: str) -> Iterator[JsonObject]:
    if not isinstance(value, dict):
        raise ConvertError(f"{source}: want Kubernetes objects, got {str(value)[:60]!r}")
    items = value.get("items")
    if str(value.get("kind", "")).endswith("List") and isinstance(items, list):
        kind, version = str(value["kind"]).removesuffix("List"), value.get("apiVersion")
        typed = {"apiVersion": version, "kind": kind} if kind else {}
        for item in items:
            yield from _objects({**typed, **item} if isinstance(item, dict) else item, source)
    else:
        yield without_nulls(value)

"""Manifests as YAML: block style, long strings unbroken, scripts as literal blocks, no aliases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticjob.convert.parts.fields import JsonObject

_SHORT_LIST = 16
"""A longer list of numbers is written in one line."""


def manifest_text(manifests: Sequence[JsonObject]) -> str:
    """Return YAML documents, in the order of their fields."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def text(self, value: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

        def items(self, value: list[Any]) -> yaml.SequenceNode:
            numbers = len(value) > _SHORT_LIST and all(isinstance(item, int) for item in value)
            return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=numbers)

    Dumper.add_representer(str, Dumper.text)
    Dumper.add_representer(list, Dumper.items)
    texts = [yaml.dump(m, Dumper=Dumper, sort_keys=False, width=10**6, allow_unicode=True) for m in manifests]
    return "---\n".join(texts)

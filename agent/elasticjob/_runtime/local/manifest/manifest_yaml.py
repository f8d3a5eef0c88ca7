"""Read YAML as Kubernetes does: only what JSON has, and within limits. Errors name the place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

MAX_DEPTH = 100
"""Objects and lists inside of each other. A pod template needs 12."""
MAX_REPEATED = 100_000
"""Values that aliases (`*name`) repeat, in one file: a few lines can otherwise stand for more than any memory holds."""
_TAGS = ("binary", "timestamp", "omap", "pairs", "set")
"""Types of YAML that JSON does not have. Text that looks like a date is text, as for the API server."""


class ManifestYamlError(ValueError):
    """The text is not YAML, or holds what a manifest cannot. The message names the place, if there is one."""


def read_yaml_documents(text: str) -> list[Any]:
    """Return the documents of a file as JSON values, without those that are empty.

    ImportError: PyYAML is missing. ManifestYamlError: the text is invalid.
    """
    import yaml

    try:
        _check_size(yaml.parse(text, Loader=yaml.SafeLoader))
        return [value for value in yaml.load_all(text, Loader=_loader()) if value is not None]
    except yaml.YAMLError as error:
        raise ManifestYamlError(f"is not YAML: {error}") from None


def _check_size(events: Iterable[Any]) -> None:
    """Raise ManifestYamlError for text that is nested too deeply, or repeats itself without an end or too often.

    The parser's events need no recursion and repeat nothing; objects do.
    """
    import yaml

    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    values = repeated = 0
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            sizes = {}
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _problem(event.start_mark, f"*{event.anchor} is a part of itself")
            size = sizes.get(str(event.anchor), 0)
            values, repeated = values + size, repeated + size
            if repeated > MAX_REPEATED:
                raise _problem(event.start_mark, f"aliases such as *{event.anchor} repeat over {MAX_REPEATED} values")
        elif isinstance(event, yaml.CollectionStartEvent):
            values += 1
            if len(opened) == MAX_DEPTH:
                raise _problem(event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
            opened.append((event.anchor, values - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1


def _problem(mark: Any, text: str) -> ManifestYamlError:
    return ManifestYamlError(f"line {mark.line + 1}, column {mark.column + 1}: {text}")


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A loader of JSON values."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
            for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        yaml_constructors = {  # noqa: RUF012
            tag: constructor
            for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
            if tag not in {f"tag:yaml.org,2002:{name}" for name in _TAGS}
        }

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep=deep)
            except ManifestYamlError:
                raise
            except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
                # A tag that does not fit its text, or a number with too many digits.
                raise _problem(node.start_mark, f"{str(node.value)[:40]!r} is invalid: {str(error)[:80]}") from None
            if isinstance(value, float) and not math.isfinite(value):
                raise _problem(node.start_mark, f"{node.value} is not a number that JSON has")
            if isinstance(value, str) and not _is_unicode(value):
                with suppress(UnicodeDecodeError):  # JSON writes what needs two halves as two escapes
                    return value.encode("utf-16", "surrogatepass").decode("utf-16")
                raise _problem(node.start_mark, "half of a surrogate pair is not text")
            return value

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            self.flatten_mapping(node)
            node.value = [(self._name(key), value) for key, value in node.value]
            return super().construct_mapping(node, deep=deep)

        def _name(self, key: Any) -> Any:
            """Return the node of a name as JSON has it, as the API server converts it: 1 and true are names."""
            found = self.construct_object(key, deep=True)
            if isinstance(found, (str, list, dict)):
                return key  # PyYAML refuses the last two
            if not isinstance(found, int):
                raise _problem(key.start_mark, "this name is not text: put it in quotes")
            text = str(found).lower() if isinstance(found, bool) else str(found)
            return yaml.ScalarNode("tag:yaml.org,2002:str", text, key.start_mark, key.end_mark)

    return Loader


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

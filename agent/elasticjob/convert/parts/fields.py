"""Fields of a manifest that is converted, read one by one; what has no counterpart becomes a note. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]

_INTEGER = re.compile(r"[0-9]{1,18}")


class ConvertError(Exception):
    """The input cannot be converted. The message names the field and what to write instead."""


@dataclass(frozen=True)
class ConversionNote:
    """What has no counterpart, or works differently."""

    path: str
    """Path of the field in the input."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass
class Notes:
    """The notes of one job, in the order in which its fields were read."""

    items: list[ConversionNote] = field(default_factory=list)

    def add(self, path: str, text: str) -> None:
        """Add a note unless it is there already."""
        note = ConversionNote(path, text)
        if note not in self.items:
            self.items.append(note)


class InputObject:
    """An object of the input. Each `take` removes a field, so that `note_rest` finds the fields without a reader."""

    def __init__(self, value: Any, path: str) -> None:
        """`value`: an object, or None for an absent one. ConvertError: it is something else."""
        if value is not None and not isinstance(value, dict):
            raise ConvertError(f"{path}: want an object, got {value!r}")
        self.path = path
        self._fields: JsonObject = dict(value or {})

    def __bool__(self) -> bool:
        return bool(self._fields)

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Return a field's value; None if it is absent."""
        return self._fields.pop(name, None)

    def take_object(self, name: str) -> InputObject:
        return InputObject(self.take(name), self.at(name))

    def take_objects(self, name: str) -> list[InputObject]:
        """Return the items of a list of objects."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise ConvertError(f"{self.at(name)}: want a list, got {value!r}")
        items = list(enumerate(value or ()))
        if empty := [i for i, item in items if item is None]:
            raise ConvertError(f"{self.at(name)}[{empty[0]}]: is empty: write an object or remove the item")
        return [InputObject(item, f"{self.at(name)}[{i}]") for i, item in items]

    def take_integer(self, name: str) -> int | None:
        """Return a field that is a number; text of digits counts as one."""
        value = self.take(name)
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            return int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConvertError(f"{self.at(name)}: want a number, got {value!r}")
        return value

    def take_text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise ConvertError(f"{self.at(name)}: want text, got {value!r}; put it in quotes")
        return value or None

    def take_switch(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise ConvertError(f"{self.at(name)}: want true or false, got {value!r}")
        return value

    def rest(self) -> JsonObject:
        """Return the fields that were not taken, and take them."""
        rest, self._fields = self._fields, {}
        return rest

    def drop(self, *names: str) -> None:
        """Remove fields that need no note."""
        for name in names:
            self._fields.pop(name, None)

    def note_rest(self, notes: Notes, text: str) -> None:
        """Add a note for each field that was not taken."""
        for name in sorted(self._fields):
            notes.add(self.at(name), text)


def without_nulls(value: Any) -> Any:
    """Return a copy without the fields of objects that are null: the API server treats them as absent."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value

"""Compile a regular expression to a small program: a graph of places that a match goes through. Pure.

Python parses the expression, so its syntax and the meaning of its characters are Python's. What cannot be matched in
linear time is refused: look-ahead, look-behind, references to groups. A few things are refused because their meaning
is hard to predict: groups with a name, and parts that may match nothing, inside of a repetition.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

try:
    from re import _parser as _sre_parse  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _sre_parse

MAX_PATTERN = 512
"""Characters of a pattern."""
MAX_PLACES = 500
"""Places of a program. A counted repetition such as `\\d{1,9}` has a copy of its part for each count."""

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_LEAVES = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})
_REFUSED = {
    "ASSERT": "look-ahead (?=...) or look-behind (?<=...) is not possible: write its text as part of the pattern",
    "ASSERT_NOT": "(?!...) and (?<!...) are not possible: write a class of characters, such as [^0-9]",
    "GROUPREF": "a reference to a group, such as (?P=name), is not possible: write the part again",
    "GROUPREF_EXISTS": "a condition on a group, (?(name)...), is not possible: write two rules",
    "ATOMIC_GROUP": "(?>...) is not possible: write (?:...)",
    "POSSESSIVE_REPEAT": "a repetition with a + behind it is not possible: leave the last + out",
}
"""What stands in the sentence about a part of an expression that is refused."""


class PatternError(ValueError):
    """The pattern is refused. The message says what to write instead."""


class Anchor(Enum):
    """A place between two characters."""

    BEGIN = "begin"
    END = "end"
    WORD_BOUNDARY = "word boundary"


_ANCHORS = {
    "AT_BEGINNING": Anchor.BEGIN,
    "AT_BEGINNING_STRING": Anchor.BEGIN,
    "AT_END": Anchor.END,
    "AT_END_STRING": Anchor.END,
    "AT_BOUNDARY": Anchor.WORD_BOUNDARY,
}


@dataclass(frozen=True)
class Leaf:
    """Takes one character that a class accepts, and goes on at `after`."""

    accepts: int
    """Index into `PatternProgram.classes`."""
    after: int


@dataclass
class Split:
    """Goes on at several places. The first one that leads to a match wins."""

    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Save:
    """Records where a named group begins or ends: the group with the index `slot // 2`."""

    slot: int
    after: int


@dataclass(frozen=True)
class Check:
    """Goes on only where the anchor holds."""

    anchor: Anchor
    after: int


Place = Leaf | Split | Save | Check | None
"""None is the end of a match."""


@dataclass(frozen=True)
class PatternProgram:
    """What `compile_pattern` returns."""

    places: Sequence[Place]
    start: int
    classes: Sequence[re.Pattern[str]]
    """Each matches one character."""
    groups: tuple[str, ...]
    """Names of the groups, in their order."""
    literal: str
    """A text that each line which matches contains; empty if none is known."""
    word: re.Pattern[str]
    """Matches a character of a word, for `Anchor.WORD_BOUNDARY`."""


def compile_pattern(pattern: str) -> PatternProgram:
    """Return the program of a regular expression; PatternError if it is refused."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"the pattern has {len(pattern)} characters: write at most {MAX_PATTERN}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that a later Python may read in another way
            tree = _sre_parse.parse(pattern)
        return _Compiler(tree.state.flags, tree.state.groupdict).program(tree)
    except (re.error, OverflowError) as error:
        raise PatternError(f"no regular expression of Python: {error}") from None
    except RecursionError:
        raise PatternError("the pattern has too many parentheses inside of each other: write it with fewer") from None


@dataclass
class _Compiler:
    """Builds a program from its end to its start: each part is told where it goes on."""

    flags: int
    groupdict: dict[str, int]
    places: list[Place] = field(default_factory=list)
    classes: dict[tuple[str, int], int] = field(default_factory=dict)

    def program(self, tree: Any) -> PatternProgram:
        names = sorted(self.groupdict, key=self.groupdict.__getitem__)
        self._slots = {self.groupdict[name]: index for index, name in enumerate(names)}
        start = self._sequence(tree, self._add(None), self.flags, repeated=False)
        classes = [re.compile(text, flags) for text, flags in self.classes]
        word = re.compile(r"\w", self.flags & re.ASCII)
        return PatternProgram(self.places, start, classes, tuple(names), _longest_literal(tree, self.flags), word)

    def _add(self, place: Place) -> int:
        if len(self.places) >= MAX_PLACES:
            raise PatternError(
                "the pattern is too large: write + or * in place of repetitions with large numbers, such as {1,100}"
            )
        self.places.append(place)
        return len(self.places) - 1

    def _sequence(self, parts: Iterable[tuple[Any, Any]], after: int, flags: int, *, repeated: bool) -> int:
        for operation, argument in reversed(list(parts)):
            after = self._part(operation.name, argument, after, flags, repeated)
        return after

    def _part(self, name: str, argument: Any, after: int, flags: int, repeated: bool) -> int:
        if name in _LEAVES:
            return self._leaf(_class_text(name, argument), flags, after)
        if name == "SUBPATTERN":
            return self._group(argument, after, flags, repeated)
        if name == "BRANCH":
            ways = [self._sequence(way, after, flags, repeated=repeated) for way in argument[1]]
            return self._add(Split(tuple(ways)))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(argument, after, flags, repeated, greedy=name == "MAX_REPEAT")
        if name == "AT" and argument.name in _ANCHORS:
            return self._add(Check(_ANCHORS[argument.name], after))
        known = r"\B is not possible: write \b, or what stands there" if name == "AT" else ""
        raise PatternError(_REFUSED.get(name, known or f"{name} is not possible: write the pattern without it"))

    def _leaf(self, text: str, flags: int, after: int) -> int:
        flags &= re.IGNORECASE | re.ASCII | re.DOTALL
        return self._add(Leaf(self.classes.setdefault((text, flags), len(self.classes)), after))

    def _group(self, argument: Any, after: int, flags: int, repeated: bool) -> int:
        number, added, removed, parts = argument
        flags = (flags | added) & ~removed
        if number not in self._slots:
            return self._sequence(parts, after, flags, repeated=repeated)
        if repeated:
            raise PatternError(
                "a group with a name, (?P<name>...), stands inside of a repetition: write the repetition inside of it"
            )
        slot = 2 * self._slots[number]
        inside = self._sequence(parts, self._add(Save(slot + 1, after)), flags, repeated=repeated)
        return self._add(Save(slot, inside))

    def _repeat(self, argument: Any, after: int, flags: int, repeated: bool, *, greedy: bool) -> int:
        least, most, parts = argument
        often = most > 1
        if often and parts.getwidth()[0] == 0:
            raise PatternError("a part that is repeated may match nothing: write + in place of * inside of it, or no ?")
        repeated = repeated or often
        if most == _sre_parse.MAXREPEAT:
            loop = Split()
            at = self._add(loop)
            inside = self._sequence(parts, at, flags, repeated=repeated)
            loop.after = (inside, after) if greedy else (after, inside)
            after, most = at, least
        end = after
        for _ in range(most - least):  # each optional copy may be left out together with all that follow it
            inside = self._sequence(parts, after, flags, repeated=repeated)
            after = self._add(Split((inside, end) if greedy else (end, inside)))
        for _ in range(least):
            after = self._sequence(parts, after, flags, repeated=repeated)
        return after


def _class_text(name: str, argument: Any) -> str:
    """Return a regular expression for one character."""
    match name:
        case "ANY":
            return "."
        case "LITERAL":
            return _escaped(argument)
        case "NOT_LITERAL":
            return f"[^{_escaped(argument)}]"
    items = [(operation.name, value) for operation, value in argument]
    return f"[{''.join(_item_text(operation, value) for operation, value in items)}]"


def _item_text(operation: str, value: Any) -> str:
    match operation:
        case "NEGATE":
            return "^"
        case "LITERAL":
            return _escaped(value)
        case "RANGE":
            return f"{_escaped(value[0])}-{_escaped(value[1])}"
        case "CATEGORY" if value.name in _CATEGORIES:
            return _CATEGORIES[value.name]
    raise PatternError(f"{operation} is not possible in a class of characters: write the pattern without it")


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"


def _longest_literal(tree: Any, flags: int) -> str:
    """Return the longest text that each match contains, as far as the outermost parts show it."""
    runs = [""]
    _collect_literals(tree, flags, runs)
    return max(runs, key=len)


def _collect_literals(parts: Iterable[tuple[Any, Any]], flags: int, runs: list[str]) -> None:
    for operation, argument in parts:
        if operation.name == "LITERAL" and not flags & re.IGNORECASE:
            runs[-1] += chr(argument)
        elif operation.name == "SUBPATTERN":
            _collect_literals(argument[3], (flags | argument[1]) & ~argument[2], runs)
        elif operation.name != "AT":
            runs.append("")

"""Find a regular expression in lines of output, in a time that grows with the line's length only.

`re` goes back and tries again: `(a+)+$` takes it hours for a line of 40 characters. Here all ways through the pattern
are followed at once, in their order of preference, so each character is looked at once. The result is that of
`re.search`.

What follows from a set of ways and a character is kept in a table, so most characters cost one look-up. The table is
emptied when it is full. Positions of groups are found afterwards, from the end of the match back to its start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob._runtime.contract.log_rules.pattern_program import (
    Anchor,
    Check,
    Leaf,
    PatternProgram,
    Save,
    compile_pattern,
)

MAX_LINE = 4096
"""Characters of a line in which a pattern is looked for; the rest is ignored."""
MAX_TABLE = 100_000
"""Places in the table of a pattern."""
_MAX_CHARACTERS = 4096
"""Different characters whose classes are kept."""
_NEW = -1
"""Source of a way that begins at this character."""

_Slots = tuple[int, ...]
_Way = tuple[int, _Slots]
"""Where a way came from: its index among the ways before the character, and the slots that it has recorded there."""


@dataclass
class _State:
    """The ways through the pattern before a character, the preferred one first."""

    ways: tuple[int, ...]
    """The place where each goes on."""
    searching: bool
    """Whether a match may still begin here."""
    at_begin: bool
    after_word: bool
    """Whether the character before is one of a word."""
    moves: dict[str, _Move] = field(default_factory=dict)
    """What follows, by the next character; the empty one is the end of the line."""


@dataclass(frozen=True)
class _Move:
    """What follows from a state and a character."""

    state: _State
    """The state after the character."""
    sources: tuple[_Way, ...]
    """For each way of that state."""
    match: _Way | None
    """The way that is complete before the character. Ways that are still followed are preferred to it."""


class LinePattern:
    """A pattern, and its table. Not for several threads."""

    def __init__(self, pattern: str, max_table: int = MAX_TABLE) -> None:
        """`max_table`: places that the table may have. PatternError: the pattern is refused."""
        self._program: PatternProgram = compile_pattern(pattern)
        self.groups = self._program.groups
        """Names of the groups, in their order."""
        self.steps = 0
        """What has been done so far: characters and places that were looked at."""
        self._max_table = max_table
        self._characters: dict[str, tuple[int, bool]] = {}
        self._empty_table()

    def find(self, line: str) -> dict[str, str] | None:
        """Return the text of each named group that took part in the first match; None without a match.

        Only the first MAX_LINE characters are looked at, as if the line ended there.
        """
        line = line[:MAX_LINE]
        if self._program.literal not in line:
            return None
        moves: list[_Move] = []
        found, state = -1, self._start
        for at, character in enumerate((*line, "")):
            move = state.moves.get(character) or self._move(state, character)
            moves.append(move)
            if move.match is not None:
                found = at
            state = move.state
            if not state.ways and not state.searching:
                break
        self.steps += len(moves)
        return None if found < 0 else self._texts(line, moves, found)

    def _texts(self, line: str, moves: list[_Move], end: int) -> dict[str, str]:
        """Follow the way that matched from its end to its start, and return the texts of its groups."""
        at, positions, way = end, dict[int, int](), moves[end].match
        while way is not None:
            source, slots = way
            positions |= dict.fromkeys(slots, at)
            if source == _NEW:
                break
            at -= 1
            way = moves[at].sources[source]
        return {
            name: line[positions[2 * index] : positions[2 * index + 1]]
            for index, name in enumerate(self.groups)
            if 2 * index + 1 in positions
        }

    # ---- the table ---------------------------------------------------------------------------------------------------

    def _empty_table(self) -> None:
        self._table: dict[tuple[tuple[int, ...], bool, bool, bool], _State] = {}
        self.table_size = 0
        """Places in the table."""
        self._start = self._state((), searching=True, at_begin=True, after_word=False)

    def _state(self, ways: tuple[int, ...], *, searching: bool, at_begin: bool, after_word: bool) -> _State:
        key = (ways, searching, at_begin, after_word)
        if key not in self._table:
            self._table[key] = _State(*key)
            self.table_size += len(ways) + 1
        return self._table[key]

    def _move(self, state: _State, character: str) -> _Move:
        """Return what follows, and keep it."""
        accepted, is_word = self._classes(character) if character else (0, False)
        leaves, match = self._follow(state, ends=not character, boundary=state.after_word != is_word)
        ways: dict[int, _Way] = {}
        for leaf, way in leaves:
            if accepted >> leaf.accepts & 1:
                ways.setdefault(leaf.after, way)
        searching = state.searching and match is None and bool(character)
        if self.table_size > self._max_table:
            self._empty_table()
        after = self._state(tuple(ways), searching=searching, at_begin=False, after_word=is_word)
        state.moves[character] = move = _Move(after, tuple(ways.values()), match)
        self.table_size += len(ways) + 1
        return move

    def _follow(self, state: _State, *, ends: bool, boundary: bool) -> tuple[list[tuple[Leaf, _Way]], _Way | None]:
        """Return the leaves that the ways reach without a character, and the way that is complete before all others.

        Of two ways to a place the preferred one stays. Ways behind one that is complete are given up.
        """
        holds = {Anchor.BEGIN: state.at_begin, Anchor.END: ends, Anchor.WORD_BOUNDARY: boundary}
        leaves: list[tuple[Leaf, _Way]] = []
        seen = set[int]()
        starts = [(place, source) for source, place in enumerate(state.ways)]
        if state.searching:
            starts.append((self._program.start, _NEW))
        for start, source in starts:
            stack: list[tuple[int, _Slots]] = [(start, ())]
            while stack:
                at, slots = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                self.steps += 1
                place = self._program.places[at]
                if place is None:
                    return leaves, (source, slots)
                if isinstance(place, Leaf):
                    leaves.append((place, (source, slots)))
                elif isinstance(place, Save):
                    stack.append((place.after, (*slots, place.slot)))
                elif isinstance(place, Check):
                    if holds[place.anchor]:
                        stack.append((place.after, slots))
                else:
                    stack.extend((after, slots) for after in reversed(place.after))
        return leaves, None

    def _classes(self, character: str) -> tuple[int, bool]:
        """Return which classes accept a character, as bits, and whether it is one of a word."""
        known = self._characters.get(character)
        if known is None:
            if len(self._characters) >= _MAX_CHARACTERS:
                self._characters.clear()
            bits = sum(1 << i for i, accepts in enumerate(self._program.classes) if accepts.match(character))
            known = bits, self._program.word.match(character) is not None
            self._characters[character] = known
        return known

"""The pattern of a log rule finds what `re.search` finds, in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elasticjob._runtime.contract.log_rules.line_pattern import MAX_LINE, LinePattern
from elasticjob._runtime.contract.log_rules.pattern_program import MAX_PATTERN, PatternError
from support.common.examples import examples

MEGATRON = r"iteration +(?P<step>\d+)/ *(?P<total>\d+) .* lm loss: (?P<loss>\S+)"
LINE = (
    " [2026-01-01 10:00:00] iteration      120/    500 | elapsed time per iteration (ms): 31.2 | lm loss: 1.08E+01 | x"
)


@pytest.mark.parametrize(
    ("pattern", "line", "groups"),
    [
        (MEGATRON, LINE, {"step": "120", "total": "500", "loss": "1.08E+01"}),
        (MEGATRON, "iteration 7 of 9", None),
        (r"(?P<a>x*)", "yxx", {"a": ""}),
        (r"(?P<a>x+)", "yxxy", {"a": "xx"}),
        (r"(?P<a>x+?)", "yxxy", {"a": "x"}),
        (r"(?P<a>x)?(?P<b>y)", "zy", {"b": "y"}),
        (r"(?i)STEP=(?P<step>\d+)", "Step=3", {"step": "3"}),
        (r"(?P<a>.)$", "ä\u20acx", {"a": "x"}),
        (r"\b(?P<a>\w+)\b!", "so it is!", {"a": "is"}),
        (r"^(?P<a>b|bc)(?P<b>c?)$", "bc", {"a": "b", "b": "c"}),
        (r"(?P<a>[^\s:]{2,3}):", "abcd:", {"a": "bcd"}),
        (r"(?x) loss \s = (?P<loss> \S+ )  # a comment", "loss =nan", {"loss": "nan"}),
    ],
)
def test_finds_groups(pattern: str, line: str, groups: dict[str, str] | None) -> None:
    assert LinePattern(pattern).find(line) == groups


_CHARACTERS = st.sampled_from([*"abA1 _.:\u00e9", r"\d", r"\w", r"\s", r"\W", "[ab]", "[^a]", "[a-b1]", r"\.", "."])
_ANCHORS = st.sampled_from(["^", "$", r"\b", ""])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, repeats).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        inner.map(lambda p: f"({p})"),
    )


_PATTERNS = st.recursive(st.one_of(_CHARACTERS, _ANCHORS), _larger, max_leaves=8)
_LINES = st.text("abA1 _.:\u00e9", max_size=12)


@examples(300)
@given(_PATTERNS, _PATTERNS, _PATTERNS, _LINES, st.booleans())
@example("", "a|b", "*", "cab", False)
def test_finds_what_re_finds(before: str, one: str, two: str, line: str, any_case: bool) -> None:
    pattern = f"{'(?i)' if any_case else ''}{before}(?P<one>{one})(?:(?P<two>{two})|b)?"
    try:
        mine = LinePattern(pattern)
    except PatternError:
        assume(False)
    match = re.search(pattern, line)
    found = match and {name: text for name, text in match.groupdict().items() if text is not None}
    assert mine.find(line) == found
    assert LinePattern(pattern, max_table=3).find(line) == found, "with a table that is emptied all the time"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<x>(?:a+)+$)",
        r"(?P<x>(?:a|a)+$)",
        r"(?P<x>(?:a|aa)+$)",
        r"(?P<x>.*a.*a.*a.*a.*=)",
        r"(?P<x>(?:\w+\s?)+!)",
        r"(?P<x>a{1,60}){0,1}a{1,60}a{1,60}b",
    ],
)
@pytest.mark.parametrize("max_table", [100_000, 50])
def test_time_grows_with_the_length_only(pattern: str, max_table: int) -> None:
    def steps(length: int) -> int:
        matcher = LinePattern(pattern, max_table)
        assert matcher.find("a" * length + "?") is None
        return matcher.steps

    places = 500  # of a pattern, at most
    assert steps(MAX_LINE - 1) <= 2.2 * steps(MAX_LINE // 2)
    assert steps(MAX_LINE - 1) <= MAX_LINE * (places + 1)


def test_the_table_is_bounded() -> None:
    matcher = LinePattern(r"(?P<x>(?:a|b)*a(?:a|b){12}c)", max_table=1000)
    for number in range(3000):
        matcher.find(f"{number:013b}".translate({48: "a", 49: "b"}))
    assert matcher.table_size <= 1000 + 4 * 20


def test_the_end_of_a_long_line_is_ignored() -> None:
    matcher = LinePattern(r"loss (?P<loss>\d+)")
    assert matcher.find("x" * (MAX_LINE - 6) + " loss 12") is None
    assert matcher.find("x" * (MAX_LINE - 7) + " loss 12") == {"loss": "1"}


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        (r"(?=a)(?P<x>a)", "as part of the pattern"),
        (r"(?<=a)(?P<x>b)", "as part of the pattern"),
        (r"(?<!a)(?P<x>b)", "write a class of characters"),
        (r"(?P<x>a)(?P=x)", "write the part again"),
        (r"(?P<x>a)?(?(x)b|c)", "write two rules"),
        (r"(?:(?P<x>a))*", "write the repetition inside of it"),
        (r"(?P<x>(?:a*)*)", r"write \+ in place of \*"),
        (r"(?P<x>(?:a|b?)+)", r"write \+ in place of \*"),
        (r"(?P<x>a{1000})", "the pattern is too large"),
        (r"(?P<x>(?:a{99}){99})", "the pattern is too large"),
        (r"(?P<x>a{99999999999999999999})", "no regular expression of Python"),
        (r"(?P<x>a\Bb)", r"write \\b"),
        (r"(?P<step>\d+", r"no regular expression of Python: missing \)"),
        ("(?P<x>" + "(?:" * 80 + "a" + ")" * 81 + "b" * MAX_PATTERN, "at most 512"),
    ],
)
def test_refuses_what_it_cannot_match(pattern: str, advice: str) -> None:
    with pytest.raises(PatternError, match=advice):
        LinePattern(pattern)

"""Code blocks of the documentation: language, mark, and the output that the page shows. Pure.

A mark is an HTML comment right above a block, which readers do not see:

    <!-- not run: needs a GPU -->            nothing runs this block, and why
    <!-- run: hello -->                      the test of `RUNNERS` with this name runs it
    <!-- file: bert.yaml -->                 the runner `cluster` writes it to this file
    <!-- checked: tests/unit/test_x.py -->   that test reads it from the page
    <!-- part of: spec.template.spec -->     where a part of a manifest belongs

A block without a language is the output of the shell block before it, unless it is `checked`. `<!-- some lines -->`
above it means that the command prints other lines as well, and these in any order. `<!-- exits with 1 -->` above a
shell block means that its last command fails, because the page is about that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.cluster.kubectl import REPOSITORY

RUNNERS = {
    "cluster": "tests/e2e/test_docs_blocks.py",
    "troubleshooting": "tests/e2e/test_docs_troubleshooting.py",
    "local": "tests/integration/test_docs_blocks.py",
}
"""Name of a runner, and the file with the test that runs its blocks."""
_MARK = re.compile(r"<!-- (.+?) -->")
_FENCE = re.compile(r"( *)```(\w*)$")
SOME_LINES = "some lines"
FAILS = "exits with 1"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Path from the root of the repository."""
    section: str
    """The nearest heading above it."""
    line: int
    """Number of the line with the opening fence."""
    language: str
    text: str
    marks: tuple[str, ...] = ()
    output: Block | None = None
    """What its commands print, if the page shows that."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def mark(self, kind: str) -> str | None:
        """Return the text after `kind: ` of a mark."""
        return next((text[len(kind) + 2 :] for text in self.marks if text.startswith(f"{kind}: ")), None)


def parse_blocks(page: str, text: str) -> list[Block]:
    """Return the blocks of a page in order, without those that are the output of another one.

    Raise ValueError if a block does not end, or if an output follows no shell block.
    """
    blocks: list[Block] = []
    for block in _fenced(page, text):
        if block.language or block.mark("checked"):
            blocks.append(block)
        elif not blocks or blocks[-1].language != "bash" or blocks[-1].section != block.section or blocks[-1].output:
            raise ValueError(f"{block}: no language, and no shell block above it in its section that has no output yet")
        else:
            blocks[-1] = _with_output(blocks[-1], block)
    return blocks


def _with_output(block: Block, output: Block) -> Block:
    return Block(block.page, block.section, block.line, block.language, block.text, block.marks, output)


def _fenced(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    section, number = "", 0
    marks: list[str] = []
    while number < len(lines):
        line = lines[number]
        if opening := _FENCE.match(line):
            indent, first = len(opening[1]), number + 1
            number = first
            while number < len(lines) and lines[number].strip() != "```":
                number += 1
            if number == len(lines):
                raise ValueError(f"{page}:{first}: the block does not end")
            body = "".join(f"{line[indent:]}\n" for line in lines[first:number])
            yield Block(page, section, first, opening[2], body, tuple(marks))
            marks = []
        elif line.strip():
            if line.startswith("#"):
                section = line.lstrip("# ")
            comment = _MARK.fullmatch(line.strip())
            marks = [*marks, comment[1]] if comment else []
        number += 1


def indented_code(text: str) -> list[int]:
    """Return the numbers of lines at which code begins that is indented instead of fenced: it has no language."""
    found, fenced, before = [], False, ""
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= _FENCE.match(line) is not None
        if not fenced and not before.strip() and line.startswith("    ") and line.strip() and "```" not in line:
            found.append(number)
        before = line
    return found


def pages() -> list[Path]:
    """Return the README and the pages for people who use elasticjob."""
    started = [path for path in [REPOSITORY / "docs/get-started.md"] if path.exists()]
    folders = ("get-started", "run", "operate")
    return [
        REPOSITORY / "README.md",
        *started,
        *(p for f in folders for p in sorted((REPOSITORY / "docs" / f).glob("*.md"))),
    ]


def all_blocks() -> list[Block]:
    """Return the blocks of `pages`."""
    return [b for path in pages() for b in parse_blocks(str(path.relative_to(REPOSITORY)), path.read_text())]


def blocks_to_run(name: str) -> list[Block]:
    """Return the blocks that the runner with this name runs, in the order of the pages."""
    return [block for block in all_blocks() if block.mark("run") == name]

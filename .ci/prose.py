"""Check names and sentences against the project's vocabulary: `python .ci/prose.py [FILE...]`.

Without a file it checks all tracked ones. Each rule is a pattern and what to write instead. A line that must use the
word ends with `prose: allow`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RULES = {
    r"pok(e|es|ed|ing)|doorbells?": "enqueue; a watch event",
    r"deeds?": "action, or fault",
    r"told": "send, report, notify; in prose: say which message",
    r"heard": "received, seen",
    r"whom|whoever": "name the actor",
    r"nobody|somebody|anybody": "name the actor, or use the passive",
    r"gists?": "summary",
    r"verdicts?": "outcome, decision, result",
    r"judg(e|es|ed|ing)": "evaluate, classify",
    r"troubles?": "problem",
    r"unfit|(?<!do )(?<!does )not fit": "unhealthy",
    r"(?<!__)slots?": "index",
    r"boot ids?": "agent id",
    r"standstills?|st(ands?|ood|anding) still": "stall; pause (the time in which others waited)",
    r"muster(s|ed|ing)?": "prefork",
    r"graduat(e|es|ed|ing)|student|newborn": "preload learning: candidate, promoted",
    r"newcomers?": "joining nodes",
    r"trial forks?": "self-test",
    r"warm process(es)?": "fork server",
    r"(can|could)(not| not)? be had|(is|are|was|were) to be had": "is unavailable; cannot be pulled",
    r"the dead(?! part)": "lost nodes",
    r"told to go|leave on request": "drained, draining",
    r"restart-attempt|pod-index|podIncarnations": "index; incarnation",
    r"first breath": "start",
}
ALLOWED_FILES = {".ci/prose.py", "docs/benchmarks.md"}
SUFFIXES = {".md", ".py", ".sh", ".tpl", ".toml", ".txt", ".yaml", ""}

# A word ends at an underscore too: names are checked as prose is.
_RULES = [(re.compile(rf"(?<![a-zA-Z])(?:{words})(?![a-z])", re.IGNORECASE), advice) for words, advice in RULES.items()]


def main(names: list[str]) -> int:
    """Print each line with a word that the vocabulary replaces; return 1 where there is one."""
    files = names or subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = [problem for name in files if _is_checked(name) for problem in _problems(name)]
    print("\n".join(found) or f"prose: {len(files)} files, nothing to replace")
    return bool(found)


def _is_checked(name: str) -> bool:
    path = Path(name)
    return name not in ALLOWED_FILES and path.suffix in SUFFIXES and path.is_file() and path.name != "LICENSE"


def _problems(name: str) -> list[str]:
    text = Path(name).read_text(errors="replace")
    return [
        f"{name}:{number}: {match[0]!r}: {advice}"
        for number, line in enumerate(text.splitlines(), 1)
        if not line.endswith("prose: allow")
        for rule, advice in _RULES
        if (match := rule.search(line))
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write agent/elasticjob/cli/reasons.json, from which `elasticjob explain` reads: the tables of the documentation.

`python .ci/reasons.py --check` fails if the file is not what the pages say.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "agent/elasticjob/cli/reasons.json"
CONDITIONS = "docs/reference/conditions-and-events.md"
FAILURES = "docs/reference/exit-codes-and-failures.md"
HELP = "docs/operate/troubleshooting.md"
_NAME = re.compile(r"`(\w+)`")
_READ_ON = re.compile(r"(; | \()?(see )?\[[^\]]+\]\([^)]*\)\)?$")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def main() -> int:
    text = json.dumps(entries(), indent=1, ensure_ascii=False) + "\n"
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        print(f"{TARGET.relative_to(ROOT)} is not what the documentation says: run make reasons", file=sys.stderr)
        return 1
    return 0


def entries() -> list[dict[str, str]]:
    """Return an entry for each name in each table: what it is, what it is called, and what it means."""
    found = []
    for phase, meaning in rows(CONDITIONS, "| phase | meaning |"):
        found += [entry(name, "phase", meaning) for name in names(phase)]
    condition = ""
    for first, status, reason, meaning in rows(CONDITIONS, "| condition | status | reason | meaning |"):
        condition = plain(first) or condition
        kind = f"reason of the condition {condition} = {status}"
        found += [entry(name, kind, meaning) for name in names(reason)]
    for reason, kind, meaning in rows(CONDITIONS, "| reason | type | meaning |"):
        kinds = plain(kind).split(", ")
        for i, name in enumerate(names(reason)):
            found.append(entry(name, f"Event, {kinds[min(i, len(kinds) - 1)]}", meaning))
    for name, meaning, charged in rows(FAILURES, "| class | meaning | charged |"):
        found += [
            entry(n, "class of a failure", f"{meaning} (counts towards maxRestarts: {charged})") for n in names(name)
        ]
    for reason, cause in rows(FAILURES, "| reason | cause |"):
        found += [entry(name, "why a kubelet stopped a pod", cause) for name in names(reason)]
    help_of = {
        n: do
        for header in ("| reason | what it means | do |", "| class | it is | do |")
        for name, _, do in rows(HELP, header)
        for n in names(name)
    }
    others = {item["name"] for item in found if not item["kind"].startswith("Event")}
    for item in found:
        # What a condition says stands there only, and not at its Event a second time.
        if item["name"] in help_of and not (item["kind"].startswith("Event") and item["name"] in others):
            item["do"] = advice(help_of[item["name"]])
    return found


def rows(page: str, header: str) -> list[list[str]]:
    """Return the cells of all tables below such a header. ValueError: the page has no such table."""
    lines = (ROOT / page).read_text().splitlines()
    if header not in lines:
        raise ValueError(f"{page} has no table {header!r}")
    found = []
    for start in [number for number, line in enumerate(lines) if line == header]:
        for line in takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def names(cell: str) -> list[str]:
    return _NAME.findall(cell)


def plain(text: str) -> str:
    """Return Markdown as plain text. Commands keep their backticks, names do not."""
    return re.sub(r"`([\w.]+)`", r"\1", _LINK.sub(r"\1", text)).replace("\\|", "|").strip()


def advice(cell: str) -> str:
    """Return what to do as plain text for any job, without links to read on."""
    text = re.sub(r"\bbert\b", "JOB", plain(_READ_ON.sub("", cell)))
    return text or f"read {HELP}"


def entry(name: str, kind: str, meaning: str) -> dict[str, str]:
    return {"name": name, "kind": kind, "meaning": plain(meaning)}


if __name__ == "__main__":
    sys.exit(main())

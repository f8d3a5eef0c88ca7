"""The version is pyproject.toml's; this module knows where else it is written: `python -m release.version 0.2.0`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from release.source import REPOSITORY, ReleaseError, read_version

_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
_IMAGE = rf"(?<=elasticjob:){_NUMBER}|(?<=elasticjob-digits:){_NUMBER}"
PLACES = {
    "pyproject.toml": rf'(?<=^version = "){_NUMBER}',
    "agent/elasticjob/__init__.py": rf'(?<=^__version__ = "){_NUMBER}',
    "charts/elasticjob/Chart.yaml": rf"(?<=^version: ){_NUMBER}|(?<=^appVersion: ){_NUMBER}",
    "Dockerfile": _IMAGE,
    "README.md": _IMAGE,
    "docs/get-started/*.md": _IMAGE,
    "examples/*.yaml": _IMAGE,
    "examples/*/*": _IMAGE,
    "tests/support/cluster/jobs.py": _IMAGE,
    "tests/e2e/test_training.py": _IMAGE,
}
"""Patterns of the version by the files that have it. A name of a file may have wildcards."""


def places(repository: Path = REPOSITORY) -> Iterator[tuple[Path, str]]:
    """Yield each place: the file, and the version that is there."""
    for glob, pattern in PLACES.items():
        for path in sorted(repository.glob(glob)):
            if path.is_file():
                text = path.read_bytes().decode(errors="replace")
                yield from ((path, found[0]) for found in re.finditer(pattern, text, re.MULTILINE))


def set_version(version: str, repository: Path = REPOSITORY) -> list[Path]:
    """Write a version to all places; return the files that changed. Raise ReleaseError if it is not a version."""
    if not re.fullmatch(_NUMBER, version):
        raise ReleaseError(f"{version} is not a version: write it as 0.2.0 or 0.2.0rc1")
    changed = []
    for glob, pattern in PLACES.items():
        for path in sorted(repository.glob(glob)):
            if not path.is_file() or not re.search(pattern, before := path.read_bytes().decode(errors="replace"), re.M):
                continue
            after = re.sub(pattern, version, before, flags=re.MULTILINE)
            if after != before:
                path.write_text(after)
                changed.append(path)
    return changed


def chart_version(version: str) -> str:
    """Return the version in the form of a chart's, which is SemVer: `0.2.0rc1` is `0.2.0-rc1`."""
    return re.sub(r"(?<=\d)(a|b|rc)(?=\d+$)", r"-\1", version)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(read_version())
    else:
        for file in set_version(sys.argv[1]):
            print(file.relative_to(REPOSITORY))

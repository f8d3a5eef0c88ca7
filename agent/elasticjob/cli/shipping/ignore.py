"""Which files of a folder are not shipped. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from elasticjob.cli.shipping.errors import SubmitError

IGNORE_FILE = ".elasticjobignore"
_FOLDERS = (
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".tox", ".nox", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".idea", ".vscode", "*.egg-info",
)  # fmt: skip
_FILES = ("*.pyc", "*.pyo", ".DS_Store", ".env", IGNORE_FILE)
VENV_MARK = "pyvenv.cfg"
"""A folder with this file is a virtual environment, whatever its name."""


@dataclass(frozen=True)
class IgnoreRules:
    """Patterns of `.elasticjobignore`, beside those that always hold."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> IgnoreRules:
        """Return the rules of a file: a pattern a line, as in .gitignore. SubmitError: a pattern has `!` or `**`."""
        lines = (line.strip() for line in text.splitlines())
        patterns = tuple(line for line in lines if line and not line.startswith("#"))
        for pattern in patterns:
            if pattern.startswith("!") or "**" in pattern:
                raise SubmitError(f"{IGNORE_FILE}: {pattern!r}: patterns with ! and ** are not supported")
        return cls(patterns)

    def ignores(self, path: str, *, is_folder: bool) -> bool:
        """Return whether a file or folder is left out. `path`: relative to the root, with `/`."""
        name = path.rpartition("/")[2]
        if _matches_any(name, _FOLDERS if is_folder else _FILES):
            return True
        return any(_matches(path, name, pattern, is_folder=is_folder) for pattern in self.patterns)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matches(path: str, name: str, pattern: str, *, is_folder: bool) -> bool:
    """Match as .gitignore does: `a/` only folders; a pattern with a slash before its end is about the whole path."""
    if pattern.endswith("/"):
        if not is_folder:
            return False
        pattern = pattern.rstrip("/")
    if "/" in pattern:
        # `*` of a path does not reach across folders.
        wanted, found = pattern.lstrip("/").split("/"), path.split("/")
        return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))
    return fnmatchcase(name, pattern)

"""Location of this package's code, a directory or the agent's zip archive, for processes that run it."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
CODE_ROOT = str(_ROOT)
"""Entry of `sys.path` from which `elasticjob` is imported."""
OWN_PACKAGE = f"{CODE_ROOT}/elasticjob/"
"""Start of the paths of this package's files."""
IN_WORKERS = "elasticjob/_runtime/agent/start_workers/in_workers"
"""Folder below it with the patches of torch for each Python below a worker."""


def program() -> list[str]:
    """Return the command line that runs this code as `elasticjob`, without arguments: interpreter and program."""
    return [sys.executable, str(_ROOT if _ROOT.is_file() else _ROOT / "elasticjob")]


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `main` of one of our modules, whatever PYTHONPATH and the working folder are."""
    start = f"import sys; sys.path.insert(0, {CODE_ROOT!r}); from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-I", "-c", start, *arguments]

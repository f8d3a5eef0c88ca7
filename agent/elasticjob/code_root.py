"""Where this package's code is, for the processes that run it: a directory, or the agent's zip archive."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
CODE_ROOT = str(_ROOT)
"""What must be on `sys.path` to import `elasticjob`."""


def program() -> list[str]:
    """Return the command line that runs this very code: interpreter and what to run, without arguments."""
    return [sys.executable, str(_ROOT if _ROOT.is_file() else _ROOT / "elasticjob")]

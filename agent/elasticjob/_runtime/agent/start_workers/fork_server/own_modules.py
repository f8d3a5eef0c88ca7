"""In the fork server: import this package's functions for training code ahead of need.

A restarted worker would spend 15 ms on them before its training function begins.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

NAMES = ("State", "progress", "restartable")
"""What most scripts use."""


def import_own_modules(code_root: str) -> None:
    """Import what `import elasticjob` will find, if it is this package: the user's code may have its own `elasticjob`.

    `code_root` is the folder of the agent's code. Without torch this does nothing: these modules import it.
    """
    if "torch.distributed" not in sys.modules:
        return
    with suppress(Exception):  # whatever the user's import hooks do, the script will see it by itself
        spec = importlib.util.find_spec("elasticjob")
        if spec is not None and spec.origin == str(Path(code_root, "elasticjob", "__init__.py")):
            package = importlib.import_module("elasticjob")
            for name in NAMES:
                getattr(package, name)

"""What a Python below a worker pays for the patches if it launches and trains nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS


def _loaded(**variables: str) -> set[str]:
    """Return the modules of a Python that has started."""
    code = "import os, sys; print(*sys.modules)"  # Python's own `site` imports os
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize; {code}" if variables else code],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_a_python_that_imports_no_torch_imports_nothing_more() -> None:
    world = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1"
    more = _loaded(PYTHONPATH=f"{CODE_ROOT}/{IN_WORKERS}", ELASTICJOB_WORLD=world) - _loaded()
    assert {name.partition(".")[0] for name in more} <= {"sitecustomize", "__future__", "importlib", "warnings"}, more

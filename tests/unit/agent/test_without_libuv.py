"""`sitecustomize` for a torch without libuv, in a new interpreter with a package that imitates torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticjob._runtime.agent.start_workers.in_workers.sitecustomize import PATCHES
from elasticjob._runtime.system.code_root import CODE_ROOT, IN_WORKERS

MODULES = [name for name, patches in PATCHES.items() if "without_libuv.create_without_libuv" in patches]

TORCH = "def TCPStore(host, use_libuv=True):\n    return host, use_libuv\n_create_c10d_store = TCPStore\n"


def test_stores_are_created_without_libuv_and_the_hidden_sitecustomize_is_imported(tmp_path: Path) -> None:
    for name in MODULES:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
        path.write_text(
            "def TCPStore(host, use_libuv=True):\n    return host, use_libuv\n_create_c10d_store = TCPStore\n"
        )
    (tmp_path / "sitecustomize.py").write_text("print('hidden')\n")
    script = "\n".join(f"import {m} as m; print(m.TCPStore('h'), m.TCPStore('h', use_libuv=True))" for m in MODULES)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{CODE_ROOT}/{IN_WORKERS}", str(tmp_path)]), "USE_LIBUV": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["hidden", *["('h', False) ('h', True)"] * 2]
    assert done.stderr == ""

"""Workers whose torch lacks libuv, in a fresh interpreter with a package that looks like torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticjob.agent.launcher import WITHOUT_LIBUV


def test_torch_is_told_and_what_is_hidden_is_loaded(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "rendezvous.py").write_text("def TCPStore(host, use_libuv=True):\n    return host, use_libuv\n")
    (tmp_path / "sitecustomize.py").write_text("print('hidden')\n")
    script = "import torch.distributed.rendezvous as r; print(r.TCPStore('h'), r.TCPStore('h', use_libuv=True))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([WITHOUT_LIBUV, str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["hidden", "('h', False) ('h', True)"]
    assert done.stderr == ""

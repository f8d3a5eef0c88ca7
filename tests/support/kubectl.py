"""kubectl and helm against the cluster of `make cluster`, for tests of what a person types."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended. `output` has stdout and stderr."""

    code: int
    stdout: str
    output: str


@dataclass(frozen=True)
class Tools:
    """kubectl and helm of one cluster. A failing command is an AssertionError with its output."""

    bin: Path
    kubeconfig: Path

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> Done:
        return self._run("kubectl", args, stdin, check)

    def helm(self, *args: str, stdin: str | None = None, check: bool = True) -> Done:
        return self._run("helm", args, stdin, check)

    def _run(self, program: str, args: tuple[str, ...], stdin: str | None, check: bool) -> Done:
        ran = subprocess.run(
            [self.bin / program, *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        output = ran.stdout + ran.stderr
        assert not check or ran.returncode == 0, f"{program} {' '.join(args)}: exit {ran.returncode}\n{output}"
        return Done(ran.returncode, ran.stdout, output)

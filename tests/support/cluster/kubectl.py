"""kubectl and helm on the cluster of `make cluster`, for tests of commands that users type."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Done:
    """The result of a command. `output` is stdout and stderr."""

    code: int
    stdout: str
    output: str


def run_tool(
    program: Path,
    kubeconfig: Path,
    arguments: Sequence[str],
    *,
    stdin: str | None = None,
    timeout: float = 180,
    check: bool = True,
) -> Done:
    """Run kubectl or helm. Raise AssertionError with its output on failure, unless `check` is false."""
    process = subprocess.run(
        [program, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    output = process.stdout + process.stderr
    failure = f"{program.name} {' '.join(arguments)}: exit {process.returncode}\n{output}"
    assert not check or process.returncode == 0, failure
    return Done(process.returncode, process.stdout, output)


@dataclass(frozen=True)
class Tools:
    """kubectl and helm of one cluster, as `run_tool` runs them."""

    bin: Path
    kubeconfig: Path

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> Done:
        return run_tool(self.bin / "kubectl", self.kubeconfig, args, stdin=stdin, check=check)

    def helm(self, *args: str, stdin: str | None = None, check: bool = True) -> Done:
        return run_tool(self.bin / "helm", self.kubeconfig, args, stdin=stdin, check=check)

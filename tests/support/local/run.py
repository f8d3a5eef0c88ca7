"""`elasticjob run` as a child process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from support.common.child_process import ChildProcess

PROGRAM = [sys.executable, str(Path(__file__).parents[3] / "agent" / "elasticjob")]


def manifest(command: Sequence[str], *, name: str = "toy", **spec: object) -> dict[str, object]:
    """Return an ElasticJob with one container."""
    template = {"spec": {"containers": [{"name": "trainer", "command": list(command)}]}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"preload": [], **spec, "template": template},
    }


class LocalRun(ChildProcess):
    """One `elasticjob run`."""

    def __init__(self, job: dict[str, object], folder: Path, *args: str, within: Sequence[str] = ()) -> None:
        """`args`: more arguments. `within`: a command that replaces itself with the command in its arguments."""
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        super().__init__([*within, *PROGRAM, "run", str(path), *args], cwd=folder)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

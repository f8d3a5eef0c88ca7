"""Run the documentation's shell blocks, and compare what they print with what the page shows."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from support.docs.blocks import FAILS, SOME_LINES, Block
from support.docs.outputs import differences


@dataclass(frozen=True)
class Shell:
    """Where blocks run. `words` are the names of the page, such as `NODE`, and what a test puts in their place.

    `before`: folders whose programs are found first. A program that a test cannot run for real, such as `docker`, has a
    stand-in there.
    """

    folder: Path
    before: Sequence[Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 100.0

    def run(self, block: Block) -> str:
        """Run a block as one script, which ends at the first error, and return what it prints.

        Raise AssertionError if it fails unless the page says so, or prints something else than the page shows.
        """
        script = self._replaced(block.text)
        code, printed = self._run(script)
        print(f"{block}\n{printed}")
        assert code == (1 if FAILS in block.marks else 0), f"{block}: exit {code}\n{script}\n{printed}"
        if block.output is not None:
            some = SOME_LINES in block.output.marks
            found = differences(self._replaced(block.output.text), printed, some_lines=some)
            assert not found, "\n".join([f"{block.output}: the page shows another output", *found])
        return printed

    def problems(self, block: Block) -> list[str]:
        """Run a block, and return what `run` raises, so that one run of a test finds all that is wrong on the pages."""
        try:
            self.run(block)
        except AssertionError as error:
            return [str(error)]
        return []

    def _replaced(self, text: str) -> str:
        for word, value in self.words.items():
            text = text.replace(word, value)
        return text

    def _run(self, script: str) -> tuple[int, str]:
        """Return the exit code and the output of a script. None of its processes outlives it."""
        path = os.pathsep.join([*map(str, self.before), os.environ["PATH"]])
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**os.environ, **self.variables, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=self.timeout)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # `elasticjob run` drains and ends what it has started
            printed, _ = process.communicate(timeout=30)
            return 124, f"{printed}\nstill running after {self.timeout:g} s"


def own_kubeconfig(kubeconfig: Path, namespace: str, folder: Path) -> Path:
    """Write a kubeconfig whose namespace is this one, and return its path."""
    config = yaml.safe_load(kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def stand_in(folder: Path, name: str, script: str) -> None:
    """Write an executable program."""
    path = folder / name
    path.write_text(script)
    path.chmod(0o755)

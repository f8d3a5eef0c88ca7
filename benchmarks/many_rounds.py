"""`make soak ROUNDS=20000`: end so many rounds as fast as possible, and compare what the processes hold.

A worker kills itself in each round. After the first thousand rounds and at the end this reads the open descriptors, the
threads and the memory of the store, the agents and the fork servers, and the files of the run. What grows with the
rounds would end a job of some weeks, in which a fault happens once a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from elasticjob._runtime.agent.processes import descendants

PROGRAM = [sys.executable, str(Path(__file__).parents[1] / "agent" / "elasticjob")]
FIRST = 1000
"""The round after which growth counts: by then every cache is filled."""
DEADLINE = 60.0
"""Seconds for one round at most."""
SAMPLES, SAMPLE_INTERVAL = 20, 0.02
"""How often the processes are read for one result, which has the lowest numbers, and the seconds in between: a round
that begins or ends holds more for a moment."""
SETTLE_TIMEOUT = 60.0
"""Seconds for what has grown at the end to become less again: on a busy machine the store buffers, for some seconds,
reports that `elasticjob run` has had no time to read."""
ROUNDS_SLACK = 4
"""Descriptors, threads or files by which two results may differ."""
MEMORY_SLACK = 8 << 10
"""KiB by which the memory of a process may grow: Python keeps freed memory."""
KILLS_ITSELF = """
import os, signal, sys
if not os.path.exists(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
"""
_ROUND = re.compile(r"round \d+\.\d+\.(\d+) runs")


@dataclass(frozen=True)
class Held:
    """What one process holds, or all of them."""

    descriptors: int
    threads: int
    memory: int
    """KiB of memory that is no file."""
    files: int = 0
    """Files and folders of the run; only of all processes."""

    def lowest(self, other: Held) -> Held:
        return Held(*(min(getattr(self, f.name), getattr(other, f.name)) for f in fields(Held)))

    def has_grown(self, before: Held, processes: int) -> list[str]:
        """Return the names of what has grown since `before`, of so many processes together."""
        slack = {"memory": MEMORY_SLACK * processes}
        return [
            f.name
            for f in fields(Held)
            if getattr(self, f.name) > getattr(before, f.name) + slack.get(f.name, ROUNDS_SLACK)
        ]


class ManyRounds:
    """One `elasticjob run` whose rounds end at once."""

    def __init__(self, folder: Path, nodes: int, workers: int) -> None:
        self._folder = folder
        (folder / "tmp").mkdir()
        (folder / "end.py").write_text(KILLS_ITSELF)
        (folder / "job.yaml").write_text(yaml.safe_dump(self._job(nodes, workers)))
        env = {**os.environ, "TMPDIR": str(folder / "tmp")}
        self._process = subprocess.Popen(
            [*PROGRAM, "run", "job.yaml"], cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._log: list[str] = []
        self._round = 0
        self._changed = threading.Condition()
        # It always reads: a run that waits until its output is read does not read the store's reports.
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _job(self, nodes: int, workers: int) -> dict[str, object]:
        command = [sys.executable, str(self._folder / "end.py"), str(self._folder / "stop")]
        spec = {
            "preload": ["json"],
            "replicas": nodes,
            "nprocPerNode": workers,
            "failurePolicy": {"maxRestarts": 10_000, "restartWindowSeconds": 1},
            "template": {"spec": {"containers": [{"name": "trainer", "command": command}]}},
        }
        metadata = {"name": "rounds"}
        return {"apiVersion": "elasticjob.dev/v1alpha1", "kind": "ElasticJob", "metadata": metadata, "spec": spec}

    def until_round(self, number: int) -> None:
        """Wait until this round runs. RuntimeError: the job has ended."""
        with self._changed:
            while self._round < number:
                if not self._reader.is_alive():
                    raise RuntimeError(f"the job has ended before round {number}:\n{''.join(self._log)}")
                self._changed.wait(1)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._log = [*self._log[-20:], line]
                if match := _ROUND.search(line):
                    self._round = int(match[1])
                    self._changed.notify_all()

    def held(self) -> dict[str, Held]:
        """Return what the processes hold, by what they are, and what there is of files as `files`."""
        result = self._held_now()
        for _ in range(SAMPLES):
            time.sleep(SAMPLE_INTERVAL)
            result = _lowest(result, self._held_now())
        return result

    def held_without_growth(self, before: dict[str, Held]) -> dict[str, Held]:
        """Return `held` once nothing is more than `before`, and what is more all through SETTLE_TIMEOUT."""
        result, deadline = self.held(), time.monotonic() + SETTLE_TIMEOUT
        while any(growth(before, result)) and time.monotonic() < deadline:
            result = _lowest(result, self.held())
        return result

    def _held_now(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with suppress(OSError, ValueError, KeyError):  # it has ended
                if (kind := _kind(pid)) is not None:
                    found[f"{kind} {pid}"] = _read(pid)
        files = sum(len(folders) + len(names) for _, folders, names in os.walk(self._folder / "tmp"))
        return {**found, "files": Held(0, 0, 0, files)}

    def finish(self) -> None:
        """Let the job succeed. RuntimeError: it failed."""
        (self._folder / "stop").touch()
        if self._process.wait(DEADLINE):
            self._reader.join(DEADLINE)
            raise RuntimeError(f"the job has failed:\n{''.join(self._log)}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _lowest(before: dict[str, Held], now: dict[str, Held]) -> dict[str, Held]:
    return {name: held.lowest(before.get(name, held)) for name, held in now.items()}


def _kind(pid: int) -> str | None:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if words[0].startswith(b"elasticjob-fork-server"):
        # Pre-forked workers have its name, and come and go.
        return "fork server" if _parent_kind(pid) == "agent" and _is_session_leader(pid) else None
    return next((kind for kind in ("store", "agent", "run") if words[2:3] == [kind.encode()]), None)


def _parent_kind(pid: int) -> str | None:
    parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return "agent" if Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[2:3] == [b"agent"] else None


def _is_session_leader(pid: int) -> bool:
    return os.getsid(pid) == pid


def _read(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    lines = (line.partition(":") for line in (process / "status").read_text(errors="replace").splitlines())
    status = {name: value.split()[0] for name, _, value in lines if value.split()}
    memory = int(status["RssAnon"]) + int(status["RssShmem"])
    return Held(len(os.listdir(process / "fd")), int(status["Threads"]), memory)  # noqa: PTH208


def growth(first: dict[str, Held], last: dict[str, Held]) -> Iterator[str]:
    """Yield one line about each process that has been replaced, or that holds more at the end."""
    for name, before in first.items():
        if name not in last:
            yield f"{name} has ended"
        elif grown := last[name].has_grown(before, 1):
            yield f"{name} holds more {', '.join(grown)}: {before} -> {last[name]}"


def run(rounds: int, *, first: int = FIRST, nodes: int = 2, workers: int = 2) -> int:
    """Run so many rounds, print a table and return 1 if anything has grown since round `first`."""
    with tempfile.TemporaryDirectory(prefix="elasticjob-rounds-") as folder:
        job = ManyRounds(Path(folder), nodes, workers)
        try:
            began = time.monotonic()
            job.until_round(first)
            before = job.held()
            job.until_round(rounds)
            after = job.held_without_growth(before)
            seconds = time.monotonic() - began
            job.finish()
        finally:
            job.close()
    print(f"{rounds} rounds of {nodes} nodes with {workers} workers in {seconds:.0f} s; at round {first} and the last:")
    print(f"{'process':<22}{'descriptors':>16}{'threads':>12}{'memory, MiB':>18}{'files':>14}")
    for name, held in before.items():
        end = after.get(name, Held(0, 0, 0))
        pairs = [
            f"{held.descriptors} {end.descriptors}", f"{held.threads} {end.threads}",
            f"{held.memory / 1024:.1f} {end.memory / 1024:.1f}", f"{held.files} {end.files}",
        ]  # fmt: skip
        print(f"{name:<22}{pairs[0]:>16}{pairs[1]:>12}{pairs[2]:>18}{pairs[3]:>14}")
    problems = list(growth(before, after))
    print("\n".join(problems) or "nothing grows with the rounds")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=FIRST, help="the round after which growth counts")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of each node")
    options = parser.parse_args()
    if not 0 < options.first < options.rounds:
        parser.error("--rounds must be above --first, and both above 0")
    return run(options.rounds, first=options.first, nodes=options.nodes, workers=options.workers)


if __name__ == "__main__":
    sys.exit(main())

"""A soak without a cluster: a store and agents as processes of this machine.

A lost node is replaced at once by its next incarnation.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goodput import Fault, Step
from benchmarks.ours import Ours
from benchmarks.recovery import DEADLINE
from benchmarks.side import Size, kill
from benchmarks.soak_stage import STEP_DELAY, digits_arguments
from elasticjob._runtime.agent.processes import descendants

TRAIN = Path(__file__).parents[1] / "examples/digits/train.py"
TRAIN_IN_PROCESS = Path(__file__).parents[1] / "examples/restartable/train.py"


class LocalStage:
    """The `Stage` on this machine."""

    name = "local"
    _step = re.compile(r"\bstep=(\d+) epoch=.*\brank=0 world=(\d+) time=([\d.]+)")
    _progress_timeout = 0.0
    """Seconds; 0: none."""

    def __init__(self, nodes: int, only: str = "") -> None:
        """`only`: the only kind of fault; empty: all kinds. ValueError: there is no such kind."""
        self._nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="elasticjob-soak-"))
        self._side: Ours | None = None
        self._faults = self._possible_faults()
        self.kinds: Sequence[str] = tuple(kind for kind in self._faults if only in ("", kind))
        if not self.kinds:
            raise ValueError(f"there is no fault {only!r}: use one of {', '.join(self._faults)}")

    def _possible_faults(self) -> dict[str, Callable[[random.Random], str]]:
        return {
            "worker killed": self._kill_worker,
            "node killed": self._kill_node,
            "node drained": self._drain_node,
            "store killed": self._kill_store,
            "store and worker killed": self._kill_store_and_worker,
            "scale": self._scale,
        }

    @property
    def side(self) -> Ours:
        assert self._side is not None
        return self._side

    def _command(self, steps: int) -> list[str]:
        return [str(TRAIN), "--checkpoint", str(self._folder / "checkpoint"), *digits_arguments(steps)]

    def start(self, steps: int) -> None:
        command = [sys.executable, *self._command(steps)]
        self._side = Ours(
            self._folder,
            Size(1, self._nodes),
            command=command,
            scale_up_stabilization=5.0,
            progress_timeout=self._progress_timeout,
        )
        self._side.start(self._nodes)
        if not self._side.output.wait(lambda: len(self.steps()) > 10, 180):
            raise RuntimeError(f"the job did not train within 180 s:\n{self._side.output.tail()}")

    def steps(self) -> list[Step]:
        found = (self._step.search(line.text) for line in list(self.side.output.lines))
        return [Step(float(m[3]), int(m[1]), int(m[2])) for m in found if m]

    def inject(self, kind: str, rng: random.Random) -> Fault:
        moment = time.time()
        details = self._faults[kind](rng)
        return Fault(moment, kind, details, self.side.settings.target)

    def has_ended(self) -> bool:
        return bool(self.side.reports and self.side.reports[-1][1].outcome is not None)

    def finish(self, timeout: float) -> str:
        if not self.side.output.wait(self.has_ended, timeout):
            return f"still runs:\n{self.side.output.tail(40)}"
        outcome = self.side.reports[-1][1].outcome
        assert outcome is not None
        return "Complete" if outcome.value == "Succeeded" else outcome.value

    def close(self) -> None:
        if self._side is not None:
            (self._folder.parent / "elasticjob-soak-last.log").write_text(
                "\n".join(f"{line.time:.3f} {line.source}: {line.text}" for line in self._side.output.lines)
            )
            self._side.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- faults

    def _victim(self, rng: random.Random) -> int:
        return rng.randrange(self.side.settings.target)

    def _kill_worker(self, rng: random.Random) -> str:
        return self._signal_worker(rng, signal.SIGKILL)

    def _signal_worker(self, rng: random.Random, number: signal.Signals) -> str:
        running = {index: pids for index in self.side.agents if (pids := self._workers(index))}
        if not running:
            return "no worker ran"
        index = rng.choice(sorted(running))
        for pid in running[index]:
            kill(pid, number)
        return f"of node {index}"

    def _workers(self, index: int) -> list[int]:
        agent = self.side.agents[index].pid
        return [pid for pid in descendants(agent) if _parent(pid) == agent and not _waits_to_fork(pid)]

    def _kill_node(self, rng: random.Random) -> str:
        index = self._victim(rng)
        self.side.kill_node(index)
        self.side.add(index)
        return f"node {index}"

    def _drain_node(self, rng: random.Random) -> str:
        index = self._victim(rng)
        self.side.drain(index)
        self.side.agents[index].wait(60)
        self.side.add(index)
        return f"node {index}"

    def _kill_store(self, _: random.Random) -> str:
        self.side.kill_store()
        return "and started again"

    def _kill_store_and_worker(self, rng: random.Random) -> str:
        self.side.kill_store()
        return self._kill_worker(rng)

    def _scale(self, _: random.Random) -> str:
        target = self._nodes - 1 if self.side.settings.target == self._nodes else self._nodes
        self.side.scale(target)
        return f"to {target}"


class InProcessStage(LocalStage):
    """The `Stage` on this machine, with a function that survives the end of a round."""

    name = "in process"
    _step = re.compile(r"\bstep=(\d+) .*\bworld=(\d+) rank=0 pid=\d+ time=([\d.]+)")
    _progress_timeout = DEADLINE

    def _possible_faults(self) -> dict[str, Callable[[random.Random], str]]:
        return {**super()._possible_faults(), "worker stopped": self._stop_worker}

    def _stop_worker(self, rng: random.Random) -> str:
        """A process that does nothing for ever: it is noticed after `progressTimeoutSeconds`."""
        return self._signal_worker(rng, signal.SIGSTOP)

    def _command(self, steps: int) -> list[str]:
        return [str(TRAIN_IN_PROCESS), "--steps", str(steps), "--step-delay", str(STEP_DELAY)]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _waits_to_fork(pid: int) -> bool:
    """Return whether a process is the fork server, or one that it has forked ahead of need."""
    titles = (b"elasticjob-fork-server", b"elasticjob-preforked")
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(titles)
    except OSError:
        return True

"""A local run of `faulty_training` on four nodes, into which a test injects faults one after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elasticjob._runtime.contract.names import Env
from support.common.processes import child_with, ended_for_gloo, environ_of
from support.local.partition import OWN_NETWORK, connections_of
from support.local.run import LocalRun, manifest
from support.training.fault_draw import INJECTED_BY_TEST, KINDS, NODES, REPLACES, UNNOTICED, Incident
from support.training.ledger import RoundRecord, TrainingLedger

SCRIPT = Path(__file__).with_name("faulty_training.py")
HANG_SECONDS = 10
"""The shortest progressTimeoutSeconds."""
TIMEOUT = 240.0
"""Seconds from a fault until all ranks train again, at most: two time-outs of a process group, and new agents."""
CUT_SECONDS = 15.0
"""Seconds after which a node is connected again if the other nodes do not train."""
MEMORY_LIMIT = 64 << 20
"""Bytes that a rank can allocate in the control group."""
_CGROUP = Path("/sys/fs/cgroup/memory")


def possible_kinds() -> tuple[str, ...]:
    """Return the faults that this machine can inject: two need root, one of these iptables and one cgroup v1."""
    root = os.geteuid() == 0
    missing = {"node cut"} if not (root and shutil.which("iptables")) else set()
    missing |= {"killed for memory"} if not (root and os.access(_CGROUP / "cgroup.procs", os.W_OK)) else set()
    return tuple(kind for kind in KINDS if kind not in missing)


@dataclass(frozen=True)
class FaultReport:
    """What an incident cost."""

    incident: Incident
    seconds: float
    """From the last fault to the next step of any rank."""
    full_seconds: float
    """From the last fault until all nodes have made a step."""
    kept: int
    """Processes that trained before and after, and those that were replaced because gloo had lost an operation."""
    replaced: int
    """The others."""

    @property
    def shape(self) -> str:
        """The kind of the fault if it came alone, else how the faults belong together."""
        faults = self.incident.faults
        if len(faults) == 1:
            return faults[0].kind
        return ("two at once", "in a recovery", "in the recovery from that")[sum(fault.recovery for fault in faults)]

    def __str__(self) -> str:
        times = f"next step {self.seconds:.2f} s, all nodes {self.full_seconds:.2f} s"
        return f"{self.incident}: {times}, {self.kept} processes kept, {self.replaced} replaced"


@dataclass(frozen=True)
class _Fired:
    """A fault that has happened: to which process, in which round and when (Unix seconds)."""

    kind: str
    pid: int
    round: str
    time: float


class FaultyJob:
    """A context manager. `inject` as often as wanted, then `finish`."""

    def __init__(
        self,
        folder: Path,
        *,
        step_delay: float = 0.02,
        spare_processes: bool = False,
        queued_device: bool = False,
        set_up: float = 0.0,
    ) -> None:
        """`queued_device`: train on a device that works behind the host. `set_up`: seconds that each process needs
        before its function."""
        self._folder = folder
        self._kinds = possible_kinds()
        self._memory_group = _CGROUP / f"elasticjob-test-{uuid.uuid4().hex[:8]}"
        command = [sys.executable, str(SCRIPT), str(folder), f"--step-delay={step_delay}"]
        self._more = ["--queued-device"] if queued_device else []
        command += [*self._more, *(["--spare-process"] if spare_processes else [])]
        command += [f"--set-up={set_up}"] if set_up else []
        job = manifest(
            command,
            replicas=NODES,
            elasticPolicy={"minReplicas": 1, "maxReplicas": NODES, "gracefulShutdownSeconds": 20},
            failurePolicy={"maxRestarts": 10_000},
            hangPolicy={"progressTimeoutSeconds": HANG_SECONDS},
            stopGraceSeconds=3,
            preload=["torch", "torch._dynamo"],
        )
        self._run = LocalRun(job, folder, within=OWN_NETWORK if "node cut" in self._kinds else ())
        self.ledger = TrainingLedger()
        self._position = 0
        self._number = 0
        self._store_port = 0

    def __enter__(self) -> Self:
        if "killed for memory" in self._kinds:
            self._memory_group.mkdir()
            (self._memory_group / "memory.limit_in_bytes").write_text(str(MEMORY_LIMIT))
            (self._folder / "memory-group").write_text(str(self._memory_group))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.__exit__(kind, error, trace)
        if self._memory_group.exists():
            self._memory_group.rmdir()

    @property
    def text(self) -> str:
        """The output of the run so far."""
        return self._run.text

    def wait_for(self, pattern: str) -> None:
        """Wait for the next line of output that matches."""
        self._run.wait_for(pattern)

    def inject(self, incident: Incident) -> FaultReport:
        """Let an incident happen, wait until all ranks train again, and check which processes have survived it."""
        self._wait(lambda: self._trains(after=0.0, without=set()) and self._has_store(), "all ranks train")
        before = set(self._newest().processes.values())
        self._store_port = self._store_port or int(environ_of(self._store())[Env.PORT])
        step = self.ledger.last_step + 3  # a rank may be a step ahead of what has been read
        faults = [fault.planned(step) for fault in incident.faults]
        plan = {"number": self._number, "faults": faults, "same_step": incident.same_step}
        (self._folder / "plan.tmp").write_text(json.dumps(plan))
        (self._folder / "plan.tmp").rename(self._folder / "plan.json")
        cut: list[_Fired] = []
        injected: set[int] = set()

        def all_fired() -> bool:
            found = self._fired(incident)
            for index, fired in found.items():
                if fired.kind in INJECTED_BY_TEST and index not in injected:
                    injected.add(index)
                    self._inject(fired)
                    cut.extend([fired] * (fired.kind == "node cut"))
                    (self._folder / f"injected-{self._number}-{index}").touch()
            self._heal(cut)
            return len(found) == len(incident.faults)

        self._wait(all_fired, f"{incident} has happened")
        (self._folder / "plan.json").unlink()
        fired = list(self._fired(incident).values())
        last = max(f.time for f in fired)
        ended = {f.round for f in fired if f.kind not in UNNOTICED}

        def trains_again() -> bool:
            self._heal(cut)
            return not cut and self._trains(after=last, without=ended)

        self._wait(trains_again, f"all ranks train after {incident}")
        report = self._report(incident, fired, before, last, ended)
        self._number += 1
        return report

    def finish(self) -> None:
        """Let the job succeed, and compare all steps with those of a single process."""
        (self._folder / "done").touch()
        assert self._run.exit_code(TIMEOUT) == 0, self.text
        self._read()
        self.ledger.compare(train_alone(self._folder / "alone", self.ledger.last_step, *self._more))

    # ---- faults

    def _fired(self, incident: Incident) -> dict[int, _Fired]:
        """Return the faults that have happened, by their number in the incident."""
        found = {}
        for index, kind in enumerate(incident.kinds):
            path = self._folder / f"fired-{self._number}-{index}"
            if path.exists():
                content: dict[str, Any] = json.loads(path.read_text())
                found[index] = _Fired(kind, content["pid"], content["round"], content["time"])
        return found

    def _inject(self, fired: _Fired) -> None:
        if fired.kind == "store lost":
            os.kill(self._store(), signal.SIGKILL)
        elif fired.kind == "node lost":
            os.kill(_parent(fired.pid), signal.SIGKILL)
        else:
            self._cut(fired.pid)

    def _has_store(self) -> bool:
        """Return whether the nodes have found the store again, if it was lost: the ranks have trained without it."""
        return self.text.rfind(" runs: ") >= self.text.rfind("the store ended (")

    def _store(self) -> int:
        """Return the process id of the store; wait for the next one if it has been killed."""
        found: list[int] = []

        def find() -> bool:
            with suppress(AssertionError):
                found.append(child_with("store"))
            return bool(found)

        self._wait(find, "a store runs")
        return found[0]

    def _cut(self, worker: int) -> None:
        """Drop all packets of the connections that a node has, and those with which it would connect to the store.

        A worker that has not formed its group yet can do that: its round ends because its agent is lost.
        """
        for pid in (worker, _parent(worker)):
            for local, remote in connections_of(pid):
                self._iptables("-A", "INPUT", "-p", "tcp", "--sport", local, "--dport", remote, "-j", "DROP")
                self._iptables("-A", "INPUT", "-p", "tcp", "--sport", remote, "--dport", local, "-j", "DROP")
        self._iptables("-A", "INPUT", "-p", "tcp", "--dport", self._store_port, "--syn", "-j", "DROP")

    def _heal(self, cut: list[_Fired]) -> None:
        """Connect the nodes again once the others train without them."""
        if cut:
            newest = self._newest()
            without = set(newest.processes.values()).isdisjoint(fired.pid for fired in cut)
            trains = without and newest.complete and newest.first_step_time > cut[-1].time
            if trains or time.time() > cut[-1].time + CUT_SECONDS:
                self._iptables("-F", "INPUT")
                cut.clear()

    def _iptables(self, *arguments: object) -> None:
        enter = ["nsenter", f"--net=/proc/{self._run.pid}/ns/net", "iptables"]
        subprocess.run([*enter, *map(str, arguments)], check=True)

    # ---- what the ranks have recorded

    def _read(self) -> None:
        path = self._folder / "records"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._position)
                complete = file.read().rpartition(b"\n")[0]  # a line may be half written
            for line in complete.splitlines(keepends=True):
                self.ledger.add(line.decode())
            self._position += len(complete) + (len(complete) > 0)

    def _newest(self) -> RoundRecord:
        return list(self.ledger.rounds.values())[-1]

    def _trains(self, after: float, without: set[str]) -> bool:
        """Return whether all ranks have made a step after a moment, in another round than these."""
        rounds = list(self.ledger.rounds.items())
        if not rounds or rounds[-1][0] in without:
            return False
        newest = rounds[-1][1]
        times = newest.last_times.values()
        return newest.world == NODES and len(times) == NODES and min(times) > after

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while True:
            self._read()
            if condition():
                return
            assert time.monotonic() < deadline, f"not within {TIMEOUT:g} s: {what}\n{self.text}"
            assert self._run.process.poll() is None, f"the job has ended before: {what}\n{self.text}"
            time.sleep(0.005)

    def _report(
        self, incident: Incident, fired: list[_Fired], before: set[int], last: float, ended: set[str]
    ) -> FaultReport:
        newest = self._newest()
        now = set(newest.processes.values())
        hit = {f.pid for i, f in enumerate(fired) if f.kind in REPLACES or i in incident.replaced}
        # A node that is connected again before its agent has noticed the cut keeps its process. So does one that takes
        # memory when another fault ends the round.
        may_stay = {"node cut"} if len(fired) == 1 else {"node cut", "killed for memory"}
        must_end = hit - {f.pid for f in fired if f.kind in may_stay}
        lost = (before - now - hit) & ended_for_gloo(self.text)
        also = before - now - hit - lost
        assert not also, f"{incident}: processes {also} were replaced too\n{self.text}"
        assert not must_end & now, f"{incident}: processes {must_end & now} should have ended"
        if not ended:
            assert [f.round for f in fired] == [list(self.ledger.rounds)[-1]] * len(fired), f"{incident} ended a round"
        rounds = [r for key, r in self.ledger.rounds.items() if key not in ended]
        first = min((r.first_step_time for r in rounds if r.first_step_time > last), default=0.0)
        first = first or min(t for t in newest.last_times.values() if t > last)
        full = max(newest.first_step_time, first)
        return FaultReport(
            incident, first - last, full - last, len(before & now) + len(lost), len(now - before) - len(lost)
        )


def train_alone(folder: Path, steps: int, *arguments: str) -> TrainingLedger:
    """Train in a single process without an agent, and return its records."""
    folder.mkdir()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    package = str(Path(__file__).parents[3] / "agent")
    environ = {**os.environ, **place, "PYTHONPATH": package}
    command = [sys.executable, str(SCRIPT), str(folder), f"--alone={steps}", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ledger = TrainingLedger()
    for line in (folder / "records").read_text().splitlines():
        ledger.add(line)
    return ledger


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

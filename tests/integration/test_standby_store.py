"""A store and its standby store as real processes, with real agents: the store dies, alone or with a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob.code_root import CODE_ROOT
from elasticjob.contract import codec
from elasticjob.contract.messages import (
    ExpectedPod,
    OperatorView,
    PodState,
    Report,
    RoundPhase,
    RoundSettings,
    StandbyStore,
)
from elasticjob.contract.names import Env, RoundId
from elasticjob.control_link.link import ControlLink, LinkRole, connect
from support.local_run import PROGRAM

NODE_KEY, OPERATOR_KEY = b"n" * 32, b"o" * 32
NODES = 3
SETTINGS = RoundSettings(min_nodes=1, max_nodes=NODES, target=NODES)
STEPS = """
import itertools, os, time
for step in itertools.count():
    print("step", step, "of", os.environ["WORLD_SIZE"], "pid", os.getpid(), "at", time.time(), flush=True)
    time.sleep(0.02)
"""
STEP = re.compile(r"step (\d+) of (\d+) pid (\d+) at ([0-9.]+)$")


class Process:
    """A child process with the lines of its output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode().rstrip())

    async def line(self, text: str, since: int = 0) -> str:
        """Return the first line with this text after the first `since` lines."""
        for _ in range(6000):
            if found := next((line for line in self.lines[since:] if text in line), None):
                return found
            await asyncio.sleep(0.005)
        raise AssertionError(f"no line with {text!r} in:\n" + "\n".join(self.lines[-40:]))

    def steps(self) -> list[tuple[int, int, int, float]]:
        """Return the steps of its worker: number, world size, process id and time."""
        found = (STEP.search(line) for line in self.lines)
        return [(int(m[1]), int(m[2]), int(m[3]), float(m[4])) for m in found if m]

    def kill(self) -> None:
        """Send SIGKILL to the process and its workers, as the loss of its machine does."""
        os.killpg(self.process.pid, signal.SIGKILL)


class Cluster:
    """A store, its standby store, three agents, and the operator's links to both stores."""

    hosts = ("127.0.0.1",) * NODES
    """The address of each machine. The store is on the first one, with agent 0, its standby store on the second."""
    within: tuple[tuple[str, ...], ...] = ((),) * NODES
    """A command for each machine that runs another one there."""
    script = STEPS
    """What the workers run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.stores: list[Process] = []
        self.agents: list[Process] = []
        self.ports: list[int] = []
        self.operators: list[ControlLink] = []
        self.reports: list[Report | None] = [None, None]
        self.readers: list[asyncio.Task[None]] = []

    async def start(self, *command: str, **env: str) -> Process:
        environ = {**os.environ, "PYTHONPATH": str(CODE_ROOT), Env.RUN_ID: "run", Env.NODE_KEY: NODE_KEY.hex(), **env}
        started = await asyncio.create_subprocess_exec(
            *command,
            env=environ,
            start_new_session=True,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.processes.append(Process(started))
        return self.processes[-1]

    async def start_store(self, incarnation: int) -> None:
        store = await self.start(
            *self.within[incarnation], *PROGRAM, "store",
            **{
                Env.OPERATOR_KEY: OPERATOR_KEY.hex(), Env.STORE_INCARNATION: str(incarnation), Env.PORT: "0",
                Env.STANDBY_STORE: str(incarnation), Env.SETTINGS: codec.dumps(SETTINGS).decode(),
            },
        )  # fmt: skip
        line = await store.line("serving on port")
        self.stores.append(store)
        self.ports.append(int(line.split("serving on port ")[1].split(",")[0]))
        host, port = self.hosts[incarnation], self.ports[-1]
        link = await connect(host, port, role=LinkRole.OPERATOR, key=OPERATOR_KEY, run_id="run")
        self.operators.append(link)
        self.readers.append(asyncio.ensure_future(self._read_reports(incarnation, link)))

    async def _read_reports(self, incarnation: int, link: ControlLink) -> None:
        while isinstance(report := await link.receive(), Report):
            self.reports[incarnation] = report

    async def start_agent(self, index: int) -> None:
        script = self.folder / "steps.py"
        script.write_text(self.script)
        env = {
            Env.INDEX: str(index), Env.POD_NAME: f"j-{index}-0", Env.POD_IP: self.hosts[index], Env.PRELOAD: "",
            Env.STORE_ENDPOINT: f"{self.hosts[0]}:{self.ports[0]}",
            Env.TERMINATION_LOG: str(self.folder / f"end-{index}"),
        }  # fmt: skip
        command = (*self.within[index], *PROGRAM, "agent", "--", sys.executable, str(script))
        self.agents.append(await self.start(*command, **env))

    def send_views(self, sequence: int, newest_round: RoundId | None = None) -> None:
        """Send the operator's view to both stores. Agent 0 is on the node of the store."""
        pods = tuple(ExpectedPod(index, 0, f"j-{index}-0", PodState.RUNNING) for index in range(NODES))
        view = OperatorView(1, sequence, SETTINGS, 0, None, pods, serving=0)
        self.operators[0].send(replace(view, standby_store=StandbyStore(1, self.hosts[1], self.ports[1])))
        self.operators[1].send(replace(view, newest_round=newest_round, beside_store=("j-0-0",)))

    async def report(self, store: int, phase: RoundPhase, world_size: int) -> Report:
        """Return the report of a store where a round of this size runs."""
        for _ in range(6000):
            report = self.reports[store]
            if report and report.phase is phase and report.world_size == world_size and report.formed_at:
                return report
            await asyncio.sleep(0.005)
        raise AssertionError(f"store {store}: {self.reports[store]}")

    async def close(self) -> None:
        for link in self.operators:
            link.close()
        for process in self.processes:
            if process.process.returncode is None:
                process.kill()
            await process.process.wait()
        for task in (*self.readers, *(p.reader for p in self.processes)):
            task.cancel()


async def start_training(cluster: Cluster) -> None:
    """Start three nodes, and wait until they train and know their standby store."""
    for incarnation in (0, 1):
        await cluster.start_store(incarnation)
    for index in range(NODES):
        await cluster.start_agent(index)
    cluster.send_views(1)
    running = await cluster.report(0, RoundPhase.RUNNING, NODES)
    cluster.send_views(2, running.round)
    for agent in cluster.agents:
        await agent.line("step 3 ")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    found = Cluster(tmp_path)
    try:
        await start_training(found)
        yield found
    finally:
        await found.close()


async def test_when_the_store_dies_its_standby_store_takes_over_and_training_does_not_notice(cluster: Cluster) -> None:
    pids = [agent.steps()[-1][2] for agent in cluster.agents]
    killed = time.monotonic()
    cluster.stores[0].kill()
    await cluster.report(1, RoundPhase.RUNNING, NODES)
    print(f"taken over after {time.monotonic() - killed:.3f} s")
    assert time.monotonic() - killed < 5
    await asyncio.sleep(0.3)
    for agent, pid in zip(cluster.agents, pids, strict=True):
        steps = agent.steps()
        assert {found for _, _, found, _ in steps} == {pid}
        assert [number for number, *_ in steps] == list(range(len(steps)))
        assert steps[-1][3] > time.time() - 5


async def test_when_the_store_and_a_node_die_together_the_others_go_on(cluster: Cluster) -> None:
    """Rank 0 is on the lost node. No operator is needed: its links are closed."""
    for link in cluster.operators:
        link.close()
    killed = time.time()
    cluster.stores[0].kill()
    cluster.agents[0].kill()
    assert await next_step(cluster, killed) < 10


async def next_step(cluster: Cluster, fault: float) -> float:
    """Return the seconds from the fault to the first step of the last node that goes on without agent 0."""
    seconds = 0.0
    for agent in cluster.agents[1:]:
        await agent.line(f"step 0 of {NODES - 1} ")
        first = next(at for _, size, _, at in agent.steps() if size == NODES - 1)
        seconds = max(seconds, first - fault)
    print(f"next step after {seconds:.3f} s")
    return seconds


# ---- the machine of the store is cut off


def run_tool(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def machines() -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield a command for each machine, which runs another one there: a network namespace with one link to a bridge."""
    for command in ("link set lo up", "link add br0 type bridge", "addr add 10.9.0.1/24 dev br0", "link set br0 up"):
        run_tool("ip", *command.split())
    namespaces = [subprocess.Popen(["unshare", "--net", "sleep", "300"]) for _ in range(NODES)]
    try:
        own = Path("/proc/self/ns/net").readlink()
        for process in namespaces:
            while Path(f"/proc/{process.pid}/ns/net").readlink() == own:
                time.sleep(0.01)
        within = tuple(("nsenter", f"--net=/proc/{process.pid}/ns/net") for process in namespaces)
        for index, process in enumerate(namespaces):
            pid, address = str(process.pid), f"{CutOff.hosts[index]}/24"
            run_tool("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", "eth0", "netns", pid)
            run_tool("ip", "link", "set", f"v{index}", "master", "br0", "up")
            for command in (f"addr add {address} dev eth0", "link set eth0 up", "link set lo up"):
                run_tool(*within[index], "ip", *command.split())
        yield within
    finally:
        for process in namespaces:
            process.kill()
            process.wait()


class CutOff(Cluster):
    hosts = tuple(f"10.9.0.{10 + index}" for index in range(NODES))


async def cut_off(folder: Path) -> None:
    """Cut the store's machine off, and print how long the others take. Needs a network namespace of its own."""
    with machines() as CutOff.within:
        cluster = CutOff(folder)
        try:
            await start_training(cluster)
            cut = time.time()
            run_tool("ip", "link", "set", "v0", "down")
            await next_step(cluster, cut)
        finally:
            await cluster.close()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
def test_when_the_machine_of_the_store_is_cut_off_the_others_go_on(tmp_path: Path) -> None:
    """Keep-alive detects it after 2 to 3 s. The store's machine holds rank 0."""
    path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("agent", "operator", "tests"))
    command = ["unshare", "--net", sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=90, check=False
    )
    found = re.search(r"next step after ([0-9.]+) s", done.stdout)
    assert found, done.stdout + done.stderr
    print(found[0])
    assert float(found[1]) < 10


if __name__ == "__main__":
    asyncio.run(cut_off(Path(sys.argv[1])))

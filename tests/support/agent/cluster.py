"""A store, its standby store and agents as real processes, with the operator's links to both stores."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import (
    ExpectedPod,
    OperatorView,
    PodState,
    Report,
    RoundPhase,
    RoundSettings,
    StandbyStore,
)
from elasticjob._runtime.contract.names import Env, RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text
from support.local.run import PROGRAM

NODE_KEY, OPERATOR_KEY = b"n" * 32, b"o" * 32
NODES = 3
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
        for _ in range(12_000):
            if found := next((line for line in self.lines[since:] if text in line), None):
                return found
            await asyncio.sleep(0.005)
        raise AssertionError(f"no line with {text!r} in:\n" + "\n".join(self.lines[-40:]))

    def steps(self) -> list[tuple[int, int, int, float]]:
        """Return the steps of its worker: number, world size, process id and time."""
        found = (STEP.search(line) for line in self.lines)
        return [(int(m[1]), int(m[2]), int(m[3]), float(m[4])) for m in found if m]

    def kill(self) -> None:
        """Send SIGKILL to the process and its workers, as the loss of its machine does, unless all have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class AgentCluster:
    """A store, its standby store, agents, and the operator's links to both stores."""

    nodes = NODES
    hosts = ("127.0.0.1",) * NODES
    """The address of each machine. The store is on the first one, with agent 0, its standby store on the second."""
    within: tuple[tuple[str, ...], ...] = ((),) * NODES
    """A command for each machine that runs another one there."""
    store_hosts: tuple[str, ...] = ()
    """The addresses of the stores for all others; empty: those in `hosts`."""
    script = STEPS
    """What the workers run."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    launcher: Sequence[str] = (sys.executable,)
    """The command that runs the script."""
    settings = RoundSettings(min_nodes=1, max_nodes=NODES, target=NODES)
    environ: dict[str, str] = {}  # noqa: RUF012  (subclasses replace it)
    """More variables of all processes."""

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
        environ = {**os.environ, "PYTHONPATH": str(CODE_ROOT), Env.RUN_ID: "run", Env.NODE_KEY: NODE_KEY.hex()}
        environ |= {**self.environ, **env}
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
                Env.STANDBY_STORE: str(incarnation), Env.SETTINGS: codec.dumps(self.settings).decode(),
            },
        )  # fmt: skip
        line = await store.line("serving on port")
        self.stores.append(store)
        self.ports.append(int(line.split("serving on port ")[1].split(",")[0]))
        host, port = self.store_host(incarnation), self.ports[-1]
        link = await connect(host, port, role=LinkRole.OPERATOR, key=OPERATOR_KEY, run_id="run")
        self.operators.append(link)
        self.readers.append(asyncio.ensure_future(self._read_reports(incarnation, link)))

    def store_host(self, incarnation: int) -> str:
        return (self.store_hosts or self.hosts)[incarnation]

    async def _read_reports(self, incarnation: int, link: ControlLink) -> None:
        while isinstance(report := await link.receive(), Report):
            self.reports[incarnation] = report

    async def start_agent(self, index: int) -> None:
        script = self.folder / "steps.py"
        script.write_text(self.script)
        env = {
            Env.INDEX: str(index), Env.POD_NAME: f"j-{index}-0", Env.POD_IP: self.hosts[index], Env.PRELOAD: "",
            Env.STORE_ENDPOINT: endpoint_text(self.store_host(0), self.ports[0]),
            Env.TERMINATION_LOG: str(self.folder / f"end-{index}"),
        }  # fmt: skip
        command = (*self.within[index], *PROGRAM, "agent", "--", *self.launcher, str(script), *self.arguments)
        self.agents.append(await self.start(*command, **env))

    def send_views(self, sequence: int, newest_round: RoundId | None = None) -> None:
        """Send the operator's view to both stores. Agent 0 is on the node of the store."""
        pods = tuple(ExpectedPod(index, 0, f"j-{index}-0", PodState.RUNNING) for index in range(self.nodes))
        view = OperatorView(1, sequence, self.settings, 0, None, pods, serving=0)
        self.operators[0].send(replace(view, standby_store=StandbyStore(1, self.store_host(1), self.ports[1])))
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


async def start_nodes(cluster: AgentCluster) -> None:
    """Start the stores and all nodes."""
    for incarnation in (0, 1):
        await cluster.start_store(incarnation)
    for index in range(cluster.nodes):
        await cluster.start_agent(index)
    cluster.send_views(1)


async def start_training(cluster: AgentCluster) -> None:
    """Start all nodes, and wait until they train and know their standby store."""
    await start_nodes(cluster)
    running = await cluster.report(0, RoundPhase.RUNNING, cluster.nodes)
    cluster.send_views(2, running.round)
    for agent in cluster.agents:
        await agent.line("step 3 ")

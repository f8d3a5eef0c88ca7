"""Our side: a store and agents as on a cluster. This process does the operator's work."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.network import LOOPBACK, Network
from benchmarks.output import spawn
from benchmarks.side import TRAIN, Side, Size, kill, kill_session
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import ExpectedPod, OperatorView, Outcome, PodState, Report, RoundSettings
from elasticjob._runtime.contract.names import Backend, Env, RoundId, job_store_clients
from elasticjob._runtime.control_link.link import LinkError, LinkRole, connect
from elasticjob._runtime.local.store_confirmation import request_to_confirm

PROGRAM = [sys.executable, str(Path(__file__).parents[1] / "agent" / "elasticjob")]
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \[store\] (.*)")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Ours(Side):
    """Our job. Its nodes are named `bench-INDEX-INCARNATION`. A lost node is replaced only when the row calls `add`."""

    name = "ours"

    def __init__(
        self,
        folder: Path,
        size: Size = Size(),  # noqa: B008
        *,
        nproc: int = 1,
        command: Sequence[str] = (),
        backend: Backend = Backend.ELASTICJOB,
        network: Network = LOOPBACK,
        **settings: Any,
    ) -> None:
        super().__init__(folder, size)
        self._command = list(command) or [sys.executable, TRAIN, str(folder)]
        self.settings = RoundSettings(size.low, size.high, size.high, max_restarts=1000, **settings)
        self.nproc = nproc
        self._backend = backend
        self._network = network
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.store: subprocess.Popen[bytes] | None = None
        self.reports: list[tuple[float, Report]] = []
        self._keys = {role: secrets.token_hex(32) for role in LinkRole}
        self._run_id = str(uuid.uuid4())
        self._pods: dict[int, ExpectedPod] = {}
        self._sequence = 0
        self._charged: RoundId | None = None
        self._link: Any = None
        self._following: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # ---- actions of the rows

    def start(self, nodes: int) -> float:
        moment = time.time()
        self.start_store()
        for index in range(nodes):
            self._pods[index] = self._expected_pod(index)
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)
        for index in range(nodes):
            self._start_agent(index)
        return moment

    def expect(self, nodes: int) -> None:
        """Expect pods whose nodes another process starts."""
        self._pods |= {index: self._expected_pod(index) for index in range(nodes)}

    def wait_until_serving(self) -> None:
        """Wait for the store's first report."""
        if not self.output.wait(lambda: bool(self.reports), 30):
            raise RuntimeError(f"the store sent no report within 30 s:\n{self.output.tail()}")

    def wait_until_ready(self, nodes: int) -> None:
        """Wait until so many nodes can take part in a round: those in it, and standby nodes."""

        def ready() -> bool:
            return bool(self.reports) and sum(node.ready for node in self.reports[-1][1].nodes) >= nodes

        if not self.output.wait(ready, 60):
            raise RuntimeError(f"{nodes} nodes were not ready within 60 s:\n{self.output.tail()}")

    def add(self, index: int) -> float:
        moment = time.time()
        before = self._pods.get(index)
        self._pods[index] = self._expected_pod(index, before.incarnation + 1 if before else 0)
        self._schedule_view()
        self._start_agent(index)
        return moment

    def kill_node(self, index: int) -> float:
        agent = self.agents.pop(index)
        moment = time.time()
        agent.kill()  # the kernel kills its workers with it
        self._remove_later(index)
        return moment

    def drain(self, index: int) -> float:
        moment = time.time()
        self.agents[index].send_signal(signal.SIGTERM)
        self._pods[index] = replace(self._pods[index], state=PodState.DRAINING)
        self._schedule_view()
        return moment

    def scale(self, target: int) -> float:
        """Scale as `kubectl scale` does: send the target, start missing nodes; the store makes surplus nodes leave."""
        moment = time.time()
        self.settings = replace(self.settings, target=target)
        self._schedule_view()
        for index in range(target):
            if index not in self.agents or self.agents[index].poll() is not None:
                self.add(index)
        return moment

    def kill_store(self) -> float:
        assert self.store is not None
        moment = kill(self.store.pid)
        self.store.wait()
        self.start_store()
        return moment

    def dead(self) -> bool:
        return bool(self.reports and self.reports[-1][1].outcome is Outcome.FAILED)

    def marks(self, since: float) -> dict[str, float]:
        """See the base class. The times come from the logs of the store and of the agents."""
        logged = [(_unix(m[1]), m[2]) for line in list(self.output.lines) if (m := _STAMP.match(line.text))]
        ends = [t for t, text in logged if t >= since - 0.001 and re.search(r"round \S+ ends \(", text)]
        forms = [t for t, text in logged if t >= since - 0.001 and re.search(r"round \S+ starts with \d+ worker", text)]
        lines = list(self.output.lines)
        formed = [line.time for line in lines if line.time > since and " formed: " in line.text]
        found = {"detect": ends[:1], "stop": forms[-1:], "rendezvous": [max(formed)] if formed else []}
        return {name: times[0] for name, times in found.items() if times}

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._loop.stop)
        self._thread.join(5)
        self._loop.close()
        for agent in self.agents.values():
            kill_session(agent.pid)
            agent.wait()
        if self.store is not None:
            self.store.kill()
            self.store.wait()

    # ---- processes

    def start_store(self) -> None:
        environ = {
            **os.environ,
            Env.JOB: "bench",
            Env.RUN_ID: self._run_id,
            Env.NODE_KEY: self._keys[LinkRole.AGENT],
            Env.OPERATOR_KEY: self._keys[LinkRole.OPERATOR],
            Env.EXECUTION_ATTEMPT: "1",
            Env.STORE_INCARNATION: "0",
            Env.PORT: str(self.port),
            Env.STORE_CLIENTS: job_store_clients(self._backend).value,
            Env.SETTINGS: codec.dumps(self.settings).decode(),
            Env.STATE_DIR: str(self.folder),
        }
        self.store = spawn([*PROGRAM, "store"], environ, self.output, "store", str(self.folder))

    def agent_environ(self, index: int) -> dict[str, str]:
        """Return the environment that the operator gives a worker pod."""
        pod, settings = self._pods.get(index, self._expected_pod(index)), self.settings
        return {
            Env.JOB: "bench",
            Env.RUN_ID: self._run_id,
            Env.NODE_KEY: self._keys[LinkRole.AGENT],
            Env.EXECUTION_ATTEMPT: "1",
            Env.INDEX: str(index),
            Env.POD_NAME: pod.pod,
            Env.POD_IP: self._network.address(index),
            Env.INCARNATION: str(pod.incarnation),
            Env.STORE_ENDPOINT: f"{self._network.store}:{self.port}",
            Env.NPROC_PER_NODE: str(self.nproc),
            Env.RENDEZVOUS_BACKEND: self._backend.value,
            Env.KEEP_ALIVE: f"{settings.keep_alive_interval:g}x{settings.keep_alive_max_attempts}",
            Env.STOP_GRACE_SECONDS: str(settings.stop_grace),
            Env.TERMINATION_LOG: str(self.folder / f"{pod.pod}.json"),
        }

    def _start_agent(self, index: int) -> None:
        interface = {"GLOO_SOCKET_IFNAME": self._network.interface}
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **interface, **self.agent_environ(index)}
        argv = [*self._network.command(index), *PROGRAM, "agent", "--", *self._command]
        self.agents[index] = spawn(argv, environ, self.output, f"node {index}", str(self.folder))

    # ---- the operator's work

    def _expected_pod(self, index: int, incarnation: int = 0) -> ExpectedPod:
        return ExpectedPod(index, incarnation, f"bench-{index}-{incarnation}", PodState.RUNNING)

    def _remove_later(self, index: int) -> None:
        """Remove the pod from the view after a second: an operator, which watches pods, learns of its end late."""
        deleted = self._pods[index]
        self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, self._remove_now, deleted)

    def _remove_now(self, deleted: ExpectedPod) -> None:
        if (pod := self._pods.get(deleted.index)) and pod.incarnation == deleted.incarnation:
            self._pods = {index: p for index, p in self._pods.items() if index != deleted.index}
            self._send_view()

    def _schedule_view(self) -> None:
        self._loop.call_soon_threadsafe(self._send_view)

    def _send_view(self) -> None:
        if self._link is not None:
            self._sequence += 1
            pods = tuple(self._pods.values())
            view = OperatorView(1, self._sequence, self.settings, 0, self._charged, pods)
            request = request_to_confirm(self.reports[-1][1] if self.reports else None, pods)
            self._link.send(replace(view, confirmed_request=request))

    async def _follow(self) -> None:
        key = bytes.fromhex(self._keys[LinkRole.OPERATOR])
        while True:
            try:
                link = await connect(
                    self._network.store, self.port, role=LinkRole.OPERATOR, key=key, run_id=self._run_id
                )
            except (OSError, LinkError):
                await asyncio.sleep(0.02)
                continue
            self._link = link
            self._send_view()
            while (message := await link.receive()) is not None:
                if isinstance(message, Report):
                    self._receive(message)
            self._link = None

    def _receive(self, report: Report) -> None:
        self.reports.append((time.time(), report))
        newest = max((e.round for e in report.ended_rounds), default=self._charged)
        if newest != self._charged:
            self._charged = newest
            self._send_view()
        elif report.confirmation_request:
            self._send_view()


def _unix(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def output_of(folder: Path, script: str, end: str, *, nodes: int, arguments: Sequence[str] = ()) -> list[str] | None:
    """Run a script on so many nodes until one has printed `end`; return all lines, None if it does not within 120 s."""
    with Ours(folder, Size(nodes, nodes), command=[sys.executable, script, *arguments]) as side:
        side.start(nodes)
        ended = side.output.wait(lambda: any(end in line.text for line in side.output.lines), 120, side.dead)
        return [line.text for line in side.output.lines] if ended else None

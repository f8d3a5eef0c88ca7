"""The operator as its own process, and what it counts of its requests."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import aiohttp

from benchmarks.api_server import ADDRESS, ApiServer
from elasticjob._runtime.agent.processes import die_with_parent
from support.common.ports import free_ports

NAMESPACE = "elasticjob-system"
STOP_SECONDS = 30.0
QUIET_SECONDS = 5.0
"""An operator has nothing to do once it has sent no request for so long."""
OPEN_FILES = 1024
"""The soft limit of open files that usual container runtimes set."""
READING = ("get", "list")
_COUNT = re.compile(r"^elasticjob_api_requests_total\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')

Requests: TypeAlias = Counter[tuple[str, str]]
"""Number of requests by verb and resource."""


class OperatorProcess:
    """`python -m elasticjob_operator` with its defaults, as the administrator. Its log is `operator.log`."""

    log = "operator.log"

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self._log = folder / self.log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        (self._port,) = free_ports(1)
        environ = {
            **os.environ,
            "KUBECONFIG": str(self._server.kubeconfig),
            "POD_NAMESPACE": NAMESPACE,
            "POD_NAME": "operator",
        }
        argv = self.command(self._port)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=_set_up
            )

    def command(self, port: int) -> list[str]:
        """Return the command. `port`: of its metrics."""
        return [sys.executable, "-m", "elasticjob_operator", f"--metrics-port={port}", "--health-port=0"]

    def parse(self, metrics: str) -> Requests:
        """Return the requests that its metrics have."""
        return parse_requests(metrics)

    async def stop(self) -> None:
        """Send SIGTERM and wait for the end; SIGKILL after 30 s."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    async def requests(self) -> Requests:
        """Return the requests since its start, without writes of its Lease, which have a client of their own.

        Empty before it serves its metrics.
        """
        return self.parse(await self.metrics())

    async def metrics(self) -> str:
        """Return its metrics; empty before it serves them. RuntimeError: it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator has ended: {self.log_end()}")
        try:
            url = f"http://{ADDRESS}:{self._port}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return await response.text()
        except aiohttp.ClientConnectionError:
            return ""

    async def wait_until_quiet(self, timeout: float) -> Requests:
        """Wait until it has nothing to do, and return its requests since its start. TimeoutError."""
        deadline = time.monotonic() + timeout
        last, since = await self.requests(), time.monotonic()
        while time.monotonic() < since + QUIET_SECONDS:
            await asyncio.sleep(0.2)
            found = await self.requests()
            if found != last or not found:
                last, since = found, time.monotonic()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the operator still sends requests after {timeout:g} s")
        return last

    def log_end(self) -> str:
        return self._log.read_text(errors="replace")[-500:]


def _set_up() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def parse_requests(text: str) -> Requests:
    """Return the requests in the operator's metrics that the rate limit applies to. Of Leases, it only reads kubelets'
    with that client."""
    found: Requests = Counter()
    for labels, value in _COUNT.findall(text):
        named = dict(LABEL.findall(labels))
        if named["resource"] != "leases" or named["verb"] in READING:
            found[named["verb"], named["resource"]] += int(float(value))
    return found


def total(requests: Requests) -> int:
    return sum(requests.values())


def mutating(requests: Requests) -> int:
    """Return how many requests change the API, without those about Events."""
    return sum(count for (verb, plural), count in requests.items() if verb not in READING and plural != "events")


def by_verb(requests: Requests) -> Mapping[str, float]:
    """Return the requests as parts of a sample: `create pods: 6`."""
    return {f"{verb} {plural}": float(count) for (verb, plural), count in sorted(requests.items()) if count}


def share_of_limit(requests: int, seconds: float, *, rate: float, burst: int) -> float:
    """Return which part (percent) of the requests that the limit allows in this time was sent."""
    return 100.0 * requests / (burst + rate * seconds)

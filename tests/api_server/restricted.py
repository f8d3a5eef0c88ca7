"""An operator with the permissions that the chart gives it, behind a proxy that can end its watches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.api_server import ADDRESS
from benchmarks.operator_process import NAMESPACE as SYSTEM
from benchmarks.operator_process import OperatorProcess
from prometheus_client.parser import text_string_to_metric_families

from api_server.conftest import Cluster
from cluster import build
from cluster.layout import Layout
from support.cluster.api_proxy import ApiProxy, api_proxy
from support.cluster.kubectl import REPOSITORY, Tools
from support.common.ports import free_ports

RELEASE = "elasticjob"


class RestrictedOperator(OperatorProcess):
    """The operator as the chart's ServiceAccount, with the chart's rules and the values `settings`."""

    def __init__(self, cluster: Cluster, proxy: ApiProxy, settings: Sequence[str], flags: Sequence[str]) -> None:
        kubeconfig = cluster.folder / "restricted.kubeconfig"
        super().__init__(replace(cluster.server, kubeconfig=kubeconfig), cluster.folder)
        self.proxy = proxy
        self.rules = rendered_rules(cluster, settings)
        """The chart's rules, as YAML."""
        self._kubeconfig = kubeconfig
        self._cluster = cluster
        self._flags = flags
        (self._health_port,) = free_ports(1)

    def begin(self) -> None:
        """Create the ServiceAccount and its rules, and start the operator."""
        kubectl = self._cluster.kubectl
        kubectl("apply", "-f", "-", stdin=self.rules)
        token = kubectl("create", "token", RELEASE, "-n", SYSTEM).strip()
        config: dict[str, Any] = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.proxy.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }  # fmt: skip
        self._kubeconfig.write_text(json.dumps(config))
        self.start()

    def command(self, port: int) -> list[str]:
        ports = [f"--metrics-port={port}", f"--health-port={self._health_port}"]
        return [*super().command(port)[:3], *ports, "--log-format=text", *self._flags]

    async def ready(self) -> tuple[int, str]:
        """Return the status and the line of its readiness probe."""
        url = f"http://{ADDRESS}:{self._health_port}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def until_failing(self, resource: str, watches: int, timeout: float = 60.0) -> None:
        """Wait until so many watches on a resource fail."""
        deadline = time.monotonic() + timeout
        found = await self._failing(resource)
        while found != watches:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{found} watches on {resource} fail, not {watches}")
            await asyncio.sleep(0.1)
            found = await self._failing(resource)

    async def _failing(self, resource: str) -> float | None:
        with suppress(aiohttp.ClientError):
            for family in text_string_to_metric_families(await self.metrics()):
                for sample in family.samples:
                    if (sample.name, sample.labels) == ("elasticjob_failing_watches", {"resource": resource}):
                        return sample.value
        return None

    def log_text(self) -> str:
        return (self._cluster.folder / self.log).read_text(errors="replace")


def rendered_rules(cluster: Cluster, settings: Sequence[str]) -> str:
    """Return the ServiceAccount and the rules of the chart, as YAML."""
    programs = build.programs(Layout.default())
    tools = Tools(Path(programs.path("helm")).parent, cluster.server.kubeconfig)
    options = [part for setting in settings for part in ("--set", setting)]
    only = [part for name in ("serviceaccount", "rbac") for part in ("--show-only", f"templates/{name}.yaml")]
    chart = str(REPOSITORY / "charts/elasticjob")
    return tools.helm("template", RELEASE, chart, "-n", SYSTEM, "--kube-version", "1.34.0", *only, *options).stdout


@asynccontextmanager
async def restricted_operator(
    cluster: Cluster, settings: Sequence[str], *flags: str
) -> AsyncIterator[RestrictedOperator]:
    """Yield an operator that is not started yet, and stop it at the end. `settings`: values of the chart."""
    async with api_proxy(cluster.server.url, cluster.server.pki / "ca.crt") as proxy:
        operator = RestrictedOperator(cluster, proxy, settings, flags)
        try:
            yield operator
        finally:
            await operator.stop()

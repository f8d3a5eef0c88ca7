"""Prometheus and kube-state-metrics as processes of this machine, on the test cluster's operator and jobs."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.build import Programs
from elasticjob._runtime.agent.processes import die_with_parent
from support.cluster.install import CHART, OPERATOR, SYSTEM
from support.cluster.kube import Json, Kube
from support.common.ports import free_port

INTERVAL = 5
"""Seconds between two reads of a target."""


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    address: str

    def query(self, promql: str) -> list[Json]:
        """Return the samples of an instant query. HTTPError: it is no PromQL."""
        return self._result("query", query=promql)

    def query_range(self, promql: str, start: float, end: float, step: float) -> list[Json]:
        return self._result("query_range", query=promql, start=str(start), end=str(end), step=str(step))

    def wait(self, promql: str, reached: Callable[[list[Json]], bool], timeout: float) -> list[Json]:
        """Repeat a query until its samples are as they should be, and return them."""
        deadline = time.monotonic() + timeout
        while not reached(found := self.query(promql)):
            assert time.monotonic() < deadline, f"after {timeout} s: {promql}: {json.dumps(found)}"
            time.sleep(0.2)
        return found

    def _result(self, kind: str, **parameters: str) -> list[Json]:
        url = f"http://{self.address}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            found: list[Json] = json.load(response)["data"]["result"]
            return found


def configuration(kube: Kube, folder: Path, state_port: int) -> Json:
    """Return Prometheus' configuration. It reads the operator's pods through the API server, as any machine can."""
    config = yaml.safe_load(kube.kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    files = {
        "ca": cluster["certificate-authority-data"], "cert": user["client-certificate-data"],
        "key": user["client-key-data"],
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(base64.b64decode(content))
        (folder / name).chmod(0o600)
    server = urllib.parse.urlsplit(cluster["server"])
    scrapes: list[Json] = [
        {
            "job_name": pod["metadata"]["name"],
            "scheme": "https",
            "tls_config": {f"{name}_file": str(folder / name) for name in files},
            "metrics_path": f"/api/v1/namespaces/{SYSTEM}/pods/{pod['metadata']['name']}:8080/proxy/metrics",
            "static_configs": [
                {
                    "targets": [server.netloc],
                    "labels": {"pod": pod["metadata"]["name"], "service": "elasticjob-metrics"},
                }
            ],
        }
        for pod in kube.list("pods", SYSTEM, OPERATOR)
    ]
    state = {"job_name": "kube-state-metrics", "honor_labels": True}
    scrapes.append(state | {"static_configs": [{"targets": [f"127.0.0.1:{state_port}"]}]})
    return {
        "global": {"scrape_interval": f"{INTERVAL}s", "evaluation_interval": f"{INTERVAL}s"},
        "rule_files": [str(CHART / "files/alerts.yaml")],
        "scrape_configs": scrapes,
    }


@contextmanager
def prometheus(kube: Kube, programs: Programs, folder: Path) -> Iterator[Prometheus]:
    """Run both programs, whose files are in `folder`, until the context ends."""
    state_port, other_port, port = free_port(), free_port(), free_port()
    (folder / "prometheus.yml").write_text(json.dumps(configuration(kube, folder, state_port)))
    commands = {
        "kube-state-metrics": [
            f"--kubeconfig={kube.kubeconfig}", "--custom-resource-state-only=true",
            f"--custom-resource-state-config-file={CHART / 'files/kube-state-metrics.yaml'}",
            "--host=127.0.0.1", f"--port={state_port}", "--telemetry-host=127.0.0.1",
            f"--telemetry-port={other_port}",
        ],
        "prometheus": [
            f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    }  # fmt: skip
    with ExitStack() as stack:
        for name, flags in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [programs.path(name), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                preexec_fn=die_with_parent,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
        server = Prometheus(f"127.0.0.1:{port}")
        _wait_ready(server)
        yield server


def _wait_ready(server: Prometheus, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            if server.query("sum(elasticjob_leader)")[0]["value"][1] == "1":
                return
        except (OSError, LookupError):
            pass
        assert time.monotonic() < deadline, "Prometheus has no leader's metrics"
        time.sleep(0.2)


def with_variables(query: str, variables: dict[str, Any]) -> str:
    """Return a dashboard's query as Grafana sends it."""
    for name, value in sorted(variables.items(), key=lambda item: -len(item[0])):
        query = query.replace(f"${name}", str(value))
    return query

"""Who may connect to the operator: the chart's NetworkPolicy, and metrics that ask for tokens and TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from benchmarks.api_server import ADDRESS
from benchmarks.operator_process import NAMESPACE as SYSTEM

from api_server.conftest import Cluster
from api_server.restricted import restricted_operator
from api_server.test_chart_values import of_kind, rendered, settings_of
from support.common.ports import free_ports

SECURE = {"metrics.secure.enabled": True}


def test_the_network_policy_is_optional_and_lets_probes_the_api_server_and_stores_pass() -> None:
    assert of_kind("NetworkPolicy") == []
    values: dict[str, Any] = {"networkPolicy.enabled": True, "watchNamespaces": ["a", "b"]}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    (policy,) = of_kind("NetworkPolicy", values | {"networkPolicy.metricsFrom": [peer]})
    (deployment,) = of_kind("Deployment")
    spec = policy["spec"]
    assert spec["podSelector"] == deployment["spec"]["selector"]
    probes, metrics = spec["ingress"]
    assert ("from" in probes, probes["ports"][0]["port"], metrics["from"]) == (False, "health", [peer])
    names = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert names == {"health", "metrics"}
    _dns, api_server, stores = spec["egress"]
    assert [port["port"] for port in api_server["ports"]] == [443, 6443]
    assert [to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for to in stores["to"]] == ["a", "b"]
    (policy,) = of_kind("NetworkPolicy", {"networkPolicy.enabled": True})
    assert policy["spec"]["ingress"][1]["from"] == [{"namespaceSelector": {}}]
    assert policy["spec"]["egress"][2]["to"][0]["namespaceSelector"] == {}


def test_secure_metrics_bring_their_rules_certificate_and_monitor() -> None:
    names = {(d["kind"], d["metadata"]["name"]) for d in rendered()}
    assert not [name for _, name in names if name.endswith(("-metrics-reader", "-metrics-tls"))]
    found = settings_of(SECURE)
    assert (found.metrics_authentication, bool(found.metrics_tls)) == (True, True)
    (secret,) = of_kind("Secret", SECURE)
    assert (secret["type"], sorted(secret["data"])) == ("kubernetes.io/tls", ["tls.crt", "tls.key"])
    own = SECURE | {"metrics.secure.certificateSecret": "own"}
    assert of_kind("Secret", own) == []
    (deployment,) = of_kind("Deployment", own)
    pod = deployment["spec"]["template"]["spec"]
    assert {"name": "metrics-tls", "secret": {"secretName": "own"}} in pod["volumes"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["metrics-tls"] == found.metrics_tls
    monitored = SECURE | {"metrics.serviceMonitor.enabled": True}
    (monitor,) = of_kind("ServiceMonitor", monitored | {"metrics.serviceMonitor.endpoint": {"bearerTokenFile": "/t"}})
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["bearerTokenFile"]) == ("https", "/t")


async def test_a_real_api_server_says_who_reads_the_metrics(cluster: Cluster, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (secret,) = of_kind("Secret", SECURE)
    folder = tmp_path / "tls"
    folder.mkdir()
    write_certificate(folder, secret["data"])
    flags = [f"--metrics-port={port}", "--metrics-authentication", f"--metrics-tls={folder}"]
    async with restricted_operator(cluster, ["metrics.secure.enabled=true"], *flags) as operator:
        cluster.kubectl("create", "serviceaccount", "reader", "-n", SYSTEM)
        cluster.kubectl("create", "serviceaccount", "stranger", "-n", SYSTEM)
        role = f"{SYSTEM}:elasticjob-metrics-reader"
        cluster.kubectl(
            "create", "clusterrolebinding", "r", f"--clusterrole={role}", f"--serviceaccount={SYSTEM}:reader"
        )
        operator.begin()
        tokens = {
            name: cluster.kubectl("create", "token", name, "-n", SYSTEM).strip() for name in ("reader", "stranger")
        }
        assert await until_served(port, "") == 401
        assert [await until_served(port, token) for token in (tokens["stranger"], "x", tokens["reader"])] == [
            403,
            401,
            200,
        ]


def write_certificate(folder: Path, data: dict[str, str]) -> None:
    for name, content in data.items():
        (folder / name).write_bytes(yaml.safe_load(f"!!binary {content}"))


async def until_served(port: int, token: str) -> int:
    """Return the status of a request for the metrics, once the operator serves them."""
    url, context = f"https://{ADDRESS}:{port}/metrics", ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    while True:
        try:
            async with aiohttp.ClientSession() as session, session.get(url, ssl=context, headers=headers) as response:
                assert (response.status == 200) == ("elasticjob_build_info" in await response.text())
                return response.status
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.1)

"""Every listener accepts both families of addresses, and IPv4 alone on a machine without IPv6."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.agent.worker_scripts import DDP, script
from support.common import without_ipv6
from support.local.run import LocalRun, manifest

needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")

LISTENERS = """
import asyncio, socket, sys
from elasticjob._runtime.agent.reporting.health_endpoint import HEALTH_PORT_VARIABLE, serve_health
from elasticjob.inprocess._stores import store_server
from elasticjob._runtime.system.sockets.listening_socket import listen_on_all_addresses
from elasticjob._runtime.store.server import StoreServer
from elasticjob_operator.serving import metrics_page, probes

async def listen():
    found = {"store": await StoreServer().start(), "wrapper": store_server.serve(0)}
    found["health"], found["probes"], found["metrics"] = 8101, 8102, 8103
    assert await serve_health({HEALTH_PORT_VARIABLE: "8101"}, str, str)
    probes.serve_probes(8102, float, float, str)
    metrics_page.serve_metrics(8103)
    for name, port in found.items():
        for host in sys.argv[1:]:
            try:
                socket.create_connection((host, port), timeout=5).close()
            except OSError as error:
                print(name, host, error)
        try:
            listen_on_all_addresses(port, backlog=1)
        except OSError as error:
            print(name, "is in use" if error.errno == 98 else error)
    print("done")

asyncio.run(listen())
"""
SYSCTL = 'ip link set lo up; echo 1 > /proc/sys/net/ipv6/$0; exec "$@"'
NETWORKS = {
    "usual": ("bindv6only", [], ["127.0.0.1", "::1"]),
    "without-ipv6": ("bindv6only", without_ipv6.command(), ["127.0.0.1"]),
    "ipv6-disabled": ("conf/all/disable_ipv6", [], ["127.0.0.1"]),
}


@needs_root
@pytest.mark.parametrize("network", NETWORKS)
def test_listeners_accept_the_families_that_there_are(network: str) -> None:
    """`net.ipv6.bindv6only` is set."""
    sysctl, within, hosts = NETWORKS[network]
    folders = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("agent", "operator"))
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", SYSCTL, sysctl, *within, sys.executable, "-c", LISTENERS, *hosts],
        env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    expected = [f"{name} is in use" for name in ("store", "wrapper", "health", "probes", "metrics")]
    assert done.stdout.splitlines() == [*expected, "done"], done.stdout + done.stderr


@needs_root
@pytest.mark.torch
@pytest.mark.parametrize("network", ["without-ipv6", pytest.param("ipv6-disabled", marks=pytest.mark.deep)])
def test_a_worker_that_dies_is_replaced_on_a_machine(network: str, tmp_path: Path) -> None:
    sysctl, within, _ = NETWORKS[network]
    job = manifest([*script(tmp_path, DDP), str(tmp_path / "done")], replicas=2, preload=["torch"])
    with LocalRun(job, tmp_path, within=["unshare", "--net", "sh", "-c", SYSCTL, sysctl, *within]) as run:
        found = run.wait_for(r"step 5 rank \d of 2 pid (\d+)", 120)
        os.kill(int(found[1]), 9)
        run.wait_for(r"step 5 rank \d of 2 pid \d+ restart 1", 120)
        (tmp_path / "done").touch()
        assert run.exit_code() == 0

"""No process waits at its end for the look-up of a name that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from elasticjob._runtime.contract.names import Env, ExitCode
from elasticjob._runtime.system.code_root import CODE_ROOT, program
from support.common import silent_nameserver
from support.common.child_process import ChildProcess

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def wait_for_lookup(process: ChildProcess) -> None:
    deadline = time.monotonic() + 60
    while not silent_nameserver.was_asked(process.process.pid):
        assert process.process.poll() is None, process.text
        assert time.monotonic() < deadline, process.text
        time.sleep(0.05)


@needs_root
def test_an_agent_leaves_while_it_looks_up_its_store(tmp_path: Path) -> None:
    variables = {
        Env.RUN_ID: "run", Env.NODE_KEY: "00" * 16, Env.INDEX: "0", Env.POD_NAME: "toy-0", Env.POD_IP: "192.0.2.1",
        Env.STORE_ENDPOINT: "toy-rdzv.ns.svc:29400", Env.PRELOAD: "", Env.TERMINATION_LOG: str(tmp_path / "end"),
    }  # fmt: skip
    command = [*silent_nameserver.command(tmp_path), *program(), "agent", "--", "true"]
    with ChildProcess(command, env={**os.environ, **variables}) as agent:
        wait_for_lookup(agent)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.exit_code() == ExitCode.LEFT


@needs_root
def test_an_operator_ends_while_it_looks_up_the_api_server(tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "https://api.example:6443"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {"token": "t"}}]
    config.write_text(
        yaml.safe_dump({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"})
    )
    operator = [sys.executable, "-m", "elasticjob_operator", "--health-port=0", "--metrics-port=0"]
    environ = {**os.environ, "KUBECONFIG": str(config)}
    with ChildProcess([*silent_nameserver.command(tmp_path), *operator], env=environ) as process:
        wait_for_lookup(process)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


HANGS = """
import asyncio, socket, threading
def hang(*_, **__):
    print("looks up", flush=True)
    threading.Event().wait()
socket.getaddrinfo = hang
from elasticjob._runtime.control_link.link import LinkRole, connect
def dial():
    return connect("store.example", 29400, role=LinkRole.AGENT, key=b"k" * 16, run_id="run", timeout=0.1)
"""
VISIT = """
from elasticjob._runtime.contract.messages import QueryClosed
from elasticjob._runtime.torchrun.coordinator_query import ask_coordinator
ask_coordinator(dial, QueryClosed(), connect_timeout=0.1, answer_timeout=0.1)
"""
LEASE = """
from elasticjob_operator.loop_thread import LoopThread
async def lease():
    thread = LoopThread("lease")
    try:
        await thread.run(dial())
    finally:
        await thread.close()
asyncio.run(lease())
"""


@pytest.mark.parametrize("what", [VISIT, LEASE], ids=["torchrun", "lease"])
def test_a_process_ends_although_a_thread_of_it_hangs(what: str) -> None:
    environ = {**os.environ, "PYTHONPATH": CODE_ROOT}
    done = subprocess.run(
        [sys.executable, "-c", HANGS + what], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert "looks up" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "Error" in done.stderr

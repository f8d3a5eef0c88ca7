"""`elasticjob stacks` and `elasticjob top`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob.cli.verbs.stacks import dump_in_pod
from elasticjob.cli.verbs.top import quantity_value
from support.cli.fake_api import JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod

from .conftest import Run

STACK = """Thread 0x00007f01 (most recent call first):
  File "/app/data.py", line 3 in load

Thread 0x00007f00 (most recent call first):
  File "/app/train.py", line {} in step
  File "/app/train.py", line 9 in <module>
  File "/elasticjob/agent.pyz/elasticjob/_runtime/agent/start_workers/fork_server/main.py", line 127 in main
  File "<string>", line 1 in <module>
"""
WORKER = """
import faulthandler, os, sys, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
faulthandler.register(57, file=file, all_threads=True)
if os.fork() == 0:  # a child has the file and the handler too
    time.sleep(60)
def waits_for_the_test():
    print("ready", flush=True)
    sys.stdin.read()
waits_for_the_test()
"""


def dumped(*lines: int) -> str:
    workers = [{"localRank": i, "pid": 40 + i, "stacks": STACK.format(line)} for i, line in enumerate(lines)]
    return "a warning of the image\n" + "".join(json.dumps(worker) + "\n" for worker in workers)


@pytest.fixture
def two_pods(api: FakeApi) -> FakeApi:
    api.lists[JOBS], api.lists[PODS] = [a_job()], [a_pod(0), a_pod(1)]
    for index in (0, 1):
        line = f"[agent] bert-{index}-0: round 1.0.1 formed: 2 pods, ranks {2 * index}-{2 * index + 1} of 4 here"
        api.logs[f"bert-{index}-0"] = [f"2026-01-01T00:00:00Z {line}"]
    return api


def test_ranks_at_the_same_place_are_shown_once(two_pods: FakeApi, run: Run) -> None:
    two_pods.outputs = {"bert-0-0": dumped(5, 5), "bert-1-0": dumped(5, 7)}
    shown = run("stacks", "bert")
    assert (shown.code, shown.err) == (0, "")
    first, second = shown.out.split("\n\n")
    assert first.splitlines()[0] == "1 worker: rank 3 (bert-1-0)"
    assert 'train.py", line 7 in step' in first
    assert second.splitlines()[0] == "3 workers: rank 0 (bert-0-0), rank 1 (bert-0-0), rank 2 (bert-1-0)"
    assert "data.py" not in shown.out
    assert "agent.pyz" not in shown.out
    assert "data.py" in run("stacks", "bert", "--all-threads", "--pod", "bert-1-0").out
    assert [view["rank"] for view in run("stacks", "bert", "-o", "json").view] == [0, 1, 2, 3]
    commands = [url for _, url, _ in two_pods.requests if "/exec" in url]
    assert all("command=python3&command=-c" in url and "container=trainer" in url for url in commands)


def test_a_pod_that_may_not_be_asked_does_not_hide_the_others(two_pods: FakeApi, run: Run) -> None:
    two_pods.outputs = {"bert-0-0": dumped(5)}
    shown = run("stacks", "bert")
    assert (shown.code, "rank 0" in shown.out) == (1, True)
    assert "you may not run a command in pod bert-1-0: ask for the verb create on pods/exec" in shown.err


def test_without_handlers_it_says_what_to_set(two_pods: FakeApi, run: Run) -> None:
    two_pods.outputs = {"bert-0-0": "", "bert-1-0": ""}
    shown = run("stacks", "bert")
    assert (shown.code, "Set spec.hangPolicy" in shown.err) == (1, True)
    two_pods.lists[PODS] = []
    assert "no worker pod of bert runs" in run("stacks", "bert").err


def test_the_script_in_the_pod_finds_workers_and_not_their_children(tmp_path: Path) -> None:
    folder = tmp_path / "1.0.3-5"
    folder.mkdir()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder / "stacks")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert worker.stdout is not None
    try:
        worker.stdout.readline()
        text = Path(dump_in_pod.__file__).read_text()
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    finally:
        import os
        import signal

        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    found = [view for line in done.stdout.splitlines() if (view := json.loads(line))["pid"] == worker.pid]
    assert [view["localRank"] for view in found] == [5]
    assert "in waits_for_the_test" in found[0]["stacks"]
    assert len([line for line in done.stdout.splitlines() if '"localRank": 5' in line]) == 1


def test_top_shows_usage_limits_and_devices(two_pods: FakeApi, run: Run) -> None:
    pod = two_pods.lists[PODS][0]
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "2Gi", "nvidia.com/gpu": "8"}}
    shown = run("top", "bert")
    assert (shown.code, "the cluster has no metrics-server" in shown.err) == (0, True)
    assert shown.out.splitlines()[1].split() == ["bert-0-0", "0-1", "node0", "-", "-", "2.00Gi", "gpu:", "8"]
    metrics = {
        "metadata": pod["metadata"],
        "containers": [{"name": "trainer", "usage": {"cpu": "1500m", "memory": "512Mi"}}],
    }
    two_pods.lists["/apis/metrics.k8s.io/v1beta1/namespaces/team/pods"] = [metrics]
    shown = run("top", "bert")
    assert shown.err == ""
    assert shown.out.splitlines()[1].split()[3:6] == ["1.50", "512Mi", "2.00Gi"]
    assert run("top", "bert", "-o", "json").view["pods"][0]["memoryBytes"] == 512 * 2**20


@pytest.mark.parametrize(
    ("text", "value"),
    [("250m", 0.25), ("3", 3), ("123456789n", 0.123456789), ("2Ki", 2048), ("1.5G", 1.5e9), ("1e3", 1e3)],
)
def test_quantities(text: str, value: float) -> None:
    assert quantity_value(text) == pytest.approx(value)


def test_what_is_no_quantity() -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity_value("3x")

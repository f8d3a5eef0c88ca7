"""`elasticjob submit` as a user calls it: code without an image build, logs, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from support.cluster.jobs import DIGITS, Job
from support.cluster.kube import Kube

TRAIN = """
import os, sys, time, elasticjob, model
for step in range(int(sys.argv[1])):
    print(f"{model.GREETING}, step {step}, user {os.getuid()}", flush=True)
    elasticjob.progress(step)
    time.sleep(0.2)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "model.py").write_text("GREETING = 'first code'\n")
    return tmp_path


def command(cluster_dir: Path, namespace: str, *arguments: str) -> list[str]:
    where = ("--kubeconfig", str(cluster_dir / "kubeconfig"), "-n", namespace, "--image", DIGITS)
    return [sys.executable, "-m", "elasticjob", "submit", *where, *arguments]


def until_lines(process: subprocess.Popen[str], *texts: str) -> None:
    """Read the output until there was a line with each of the texts."""
    assert process.stdout is not None
    seen, missing = [], set(texts)
    for line in process.stdout:
        seen.append(line)
        missing -= {text for text in missing if text in line}
        if not missing:
            return
    assert process.stderr is not None
    pytest.fail(f"no line with {missing}: {seen} {process.stderr.read()}")


def test_submit_then_update_then_detach(code: Path, kube: Kube, cluster_dir: Path, namespace: str) -> None:
    """A second job of the same code, by --dry-run, has a read-only root file system and another user than root."""
    ships = ("train.py", "--code", str(code), "--name")
    dry = command(cluster_dir, namespace, *ships, "strict", "--dry-run", "--", "3")
    text = subprocess.run(dry, check=True, capture_output=True, text=True, timeout=60).stdout
    config_map, job = yaml.safe_load_all(text)
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    trainer["securityContext"] = {"runAsUser": 65534, "runAsNonRoot": True, "readOnlyRootFilesystem": True}
    kube.create("configmaps", config_map, namespace)
    kube.create("elasticjobs", job, namespace)

    line = command(cluster_dir, namespace, *ships, "mine", "--pods", "2", "--", "100000")
    environ = {**os.environ, "NO_COLOR": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environ)
    try:
        until_lines(process, "[default0]:first code, step 3,", "[default1]:first code, step 3,")
        pods = {pod["metadata"]["uid"] for pod in kube.list("pods", namespace, "elasticjob.dev/job-name=mine")}
        saved = time.monotonic()
        (code / "model.py").write_text("GREETING = 'second code'\n")
        update = [sys.executable, "-m", "elasticjob", "submit", "--kubeconfig", str(cluster_dir / "kubeconfig")]
        with subprocess.Popen([*update, "-n", namespace, "--code", str(code), "--update", "mine"]) as updating:
            until_lines(process, "[default0]:second code, step 0,", "[default1]:second code, step 0,")
            print(f"edit to the first step of all ranks: {time.monotonic() - saved:.2f} s")
            assert updating.wait(60) == 0
        assert pods == {pod["metadata"]["uid"] for pod in kube.list("pods", namespace, "elasticjob.dev/job-name=mine")}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
    assert process.stderr is not None
    assert "mine goes on without this terminal" in process.stderr.read()
    assert kube.get("elasticjobs", "mine", namespace)["status"]["active"] == 2
    kube.delete("elasticjobs", "mine", namespace)
    kube.wait_gone("configmaps", namespace, "elasticjob.dev/job-name=mine", timeout=90)

    Job(kube, namespace, "strict").wait("Complete", timeout=60)
    assert "first code, step 2, user 65534" in kube.logs("strict-0-0", namespace)

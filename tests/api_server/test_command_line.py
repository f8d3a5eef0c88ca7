"""The command line on a real API server: all verbs as the user of a namespace, and one who may only view it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from benchmarks.simulated_pods import NAMESPACE

from api_server.conftest import Cluster
from elasticjob.cli.cluster.connection import connect_to_cluster
from elasticjob.cli.ui.feed import JobFeed
from support.cli.fake_api import write_kubeconfig

ROLES = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: jobs-view, labels: {rbac.authorization.k8s.io/aggregate-to-view: "true"}}
rules:
  - {apiGroups: [elasticjob.dev], resources: [elasticjobs], verbs: [get, list, watch]}
"""


class CommandLine:
    """Runs the program with one kubeconfig."""

    def __init__(self, kubeconfig: str) -> None:
        self._environ = {**os.environ, "KUBECONFIG": kubeconfig}

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "elasticjob", *arguments, env=self._environ,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def view(self, *arguments: str) -> Any:
        code, out, err = await self.run(*arguments, "-o", "json")
        assert code == 0, err
        return json.loads(out)


async def test_all_verbs_on_a_real_api_server(cluster: Cluster) -> None:
    cluster.operator.start()
    await cluster.apply(cluster.job("bert", 1, 3))
    await cluster.until_running("bert", 3)
    admin = CommandLine(str(cluster.server.kubeconfig))

    (job,) = await admin.view("status", "-n", NAMESPACE)
    assert (job["name"], job["phase"], job["training"]) == ("bert", "Running", 3)
    status = await admin.view("status", "bert", "-n", NAMESPACE)
    assert [pod["role"] for pod in status["pods"]].count("worker") == 3
    assert "WorldFormed" in {event["reason"] for event in await admin.view("events", "bert", "-n", NAMESPACE)}
    assert "causes" not in await admin.view("why", "bert", "-n", NAMESPACE)
    code, _, err = await admin.run("logs", "bert", "-n", NAMESPACE)
    assert code == 1  # no kubelet has the logs
    assert err.count("read the log of pod bert-") == 3

    kubeconfig = viewer_kubeconfig(cluster)
    viewer = CommandLine(kubeconfig)
    assert (await viewer.view("status", "bert"))["training"] == 3
    assert "causes" not in await viewer.view("why", "bert")
    assert await viewer.view("events", "bert")
    await the_page_shows_a_fault(cluster, kubeconfig)
    await changes(cluster, admin, viewer)
    await submits(cluster, admin)


async def submits(cluster: Cluster, admin: CommandLine) -> None:
    """Submit a script: the API server takes its objects, and the job owns the code."""
    code = cluster.folder / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)")
    flags = ("--code", str(code), "--image", "example.org/i:1", "-n", NAMESPACE, "--detach", "--pods", "2")
    for arguments in (("--name", "mine", "--max-pods", "3", "--gpus", "8"), ("--name", "other", "--memory", "1Gi")):
        ended, out, err = await admin.run("submit", "train.py", *flags, *arguments, "--", "--lr", "1")
        assert (ended, out) == (0, f"{arguments[1]}\n"), err
    ended, _, err = await admin.run("submit", "train.py", *flags, "--name", "mine")
    assert (ended, "there is a job mine already" in err) == (1, True), err
    job, owned = (
        json.loads(cluster.kubectl("get", kind, "-n", NAMESPACE, "-o", "json")) for kind in ("ej/mine", "cm/mine-code")
    )
    (owner,) = owned["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("ElasticJob", job["metadata"]["uid"])
    assert (await admin.view("status", "mine", "-n", NAMESPACE))["codeSha256"] == (
        owned["metadata"]["annotations"]["elasticjob.dev/code-sha256"]
    )
    await updates(cluster, admin, code)
    ended, _, err = await admin.run("submit", "train.py", *flags, "--name", "third", "--memory", "much")
    assert (ended, "--memory much: want a size" in err) == (64, True)
    names = cluster.kubectl("get", "configmaps", "-n", NAMESPACE, "-o", "name").split()
    assert "configmap/third-code" not in names


async def the_page_shows_a_fault(cluster: Cluster, kubeconfig: str) -> None:
    """Read what `elasticjob ui` shows, as the viewer, while a pod is lost."""
    feed = JobFeed(connect_to_cluster(kubeconfig, None, None), all_namespaces=False)
    before = await asyncio.to_thread(feed.job, NAMESPACE, "bert")
    assert list(before["notRead"]) == ["pods.metrics.k8s.io"]
    assert [(r["workers"], r["how"]) for r in before["timeline"]["rounds"]] == [(3, "training")]
    assert {lane["state"] for lane in before["timeline"]["lanes"]} == {"Running"}
    await cluster.pods.fail(cluster.pods.node("bert", 1))

    def recovered() -> bool:
        status = cluster.pods.jobs["bert"]["status"]
        return bool(status["rendezvousRound"] > 1 and status.get("recentFailures"))

    await cluster.pods.until("a round after the fault", recovered, 60)
    await cluster.until_running("bert", 3)
    after = await asyncio.to_thread(feed.job, NAMESPACE, "bert")
    first, *_, last = after["timeline"]["rounds"]
    assert (first["number"], first["how"], last["how"]) == (1, "fault", "training")
    (fault,) = after["timeline"]["faults"]
    assert (fault["pod"], first["cause"].endswith("bert-1-0")) == ("bert-1-0", True)
    assert [(lane["pod"], "end" in lane) for lane in after["timeline"]["lanes"]] == [
        ("bert-0-0", False), ("bert-1-0", True), ("bert-1-1", False), ("bert-2-0", False),
    ]  # fmt: skip


async def changes(cluster: Cluster, admin: CommandLine, viewer: CommandLine) -> None:
    """Change the job by each verb that does so, first as a user who may not."""
    for arguments in (("scale", "bert", "2"), ("suspend", "bert"), ("drain", "bert-0-0", "--force")):
        code, _, err = await viewer.run(*arguments)
        assert (code, "you may not" in err) == (1, True)
    here, wait = ("-n", NAMESPACE), ("--wait", "--timeout", "60")
    code, _, err = await admin.run("scale", "bert", "9", *here)
    assert (code, "bert has from 1 to 3 worker pods" in err) == (1, True)
    code, out, err = await admin.run("scale", "bert", "2", *here, *wait)
    assert (code, out.splitlines()[-1]) == (0, "2 worker pods of bert train"), err
    # No disruption controller runs here, so that every budget refuses.
    code, _, err = await admin.run("drain", "bert-0-0", *here)
    assert (code, "bert has no pod to spare" in err) == (1, True), err
    code, out, err = await admin.run("drain", "bert-0-0", "--force", *here, *wait)
    assert (code, out.splitlines()[-1]) == (0, "bert trains at full size without bert-0-0"), err
    code, out, err = await admin.run("suspend", "bert", *here, *wait)
    assert (code, out.splitlines()[-1].startswith("bert has no worker pods")) == (0, True), err
    (cause,) = (await admin.view("why", "bert", *here))["causes"]
    assert cause["next"] == "elasticjob resume bert"
    code, out, err = await admin.run("resume", "bert", *here, *wait)
    assert (code, out.splitlines()[-1]) == (0, "bert trains"), err


async def updates(cluster: Cluster, admin: CommandLine, code: Path) -> None:
    """Edit the code of a running job: the operator's coordinator ends its round, and the pods are the same."""
    await cluster.until_running("other", 2)
    before = await admin.view("status", "other", "-n", NAMESPACE)
    (code / "train.py").write_text("print(2)")
    ended, out, err = await admin.run("submit", "--update", "other", "--code", str(code), "-n", NAMESPACE)
    assert (ended, out.splitlines()[-1]) == (0, "other trains with the new code"), err
    after = await admin.view("status", "other", "-n", NAMESPACE)
    assert after["rounds"] == before["rounds"] + 1
    assert after["codeSha256"] != before["codeSha256"]
    assert after["restartsCounted"] == before["restartsCounted"]
    assert [pod["name"] for pod in after["pods"]] == [pod["name"] for pod in before["pods"]]
    ended, out, _ = await admin.run("submit", "--update", "other", "--code", str(code), "-n", NAMESPACE)
    assert (ended, "has this code already" in out) == (0, True)


def viewer_kubeconfig(cluster: Cluster) -> str:
    """Return the kubeconfig of a user of the ClusterRole view, to which the chart adds the jobs."""
    cluster.kubectl("apply", "-f", "-", stdin=ROLES)
    # The controller that aggregates ClusterRoles does not run here: the rules are added as it would add them.
    view = yaml.safe_load(cluster.kubectl("get", "clusterrole", "view", "-o", "yaml"))
    core = [
        {
            "apiGroups": [""],
            "resources": ["pods", "pods/log", "events", "resourcequotas"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    view["rules"] = [*core, *yaml.safe_load(ROLES)["rules"]]
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(view))
    cluster.kubectl("create", "serviceaccount", "viewer", "-n", NAMESPACE)
    account = f"--serviceaccount={NAMESPACE}:viewer"
    cluster.kubectl("create", "rolebinding", "viewer", "--clusterrole=view", account, "-n", NAMESPACE)
    token = cluster.kubectl("create", "token", "viewer", "-n", NAMESPACE).strip()
    path = cluster.folder / "viewer.kubeconfig"
    write_kubeconfig(path, cluster.server.url, token, NAMESPACE, str(cluster.server.pki / "ca.crt"))
    return str(path)

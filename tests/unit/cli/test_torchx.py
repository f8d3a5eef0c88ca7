"""The TorchX scheduler, by TorchX's own command line and by the methods that TorchX calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchx.components import dist, utils
from torchx.schedulers import get_scheduler_factories
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, AppState, BindMount, Resource, VolumeMount, Workspace, macros

from elasticjob._runtime.contract.shipped_code import MAX_PACKED
from elasticjob.cli.shipping.errors import SubmitError
from elasticjob.cli.verbs.logs import logs
from elasticjob.torchx_scheduler import ElasticJobScheduler
from support.cli.fake_api import JOBS, NAMESPACE, PODS, FakeApi
from support.cli.objects import a_job, a_pod, condition_of, stamp

MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
DDP = ("dist.ddp", "-j", "2x3", "--image", "torch:1", "--script", "train.py", "--", "--lr", "0.1")


@pytest.fixture
def scheduler(api: FakeApi) -> ElasticJobScheduler:
    """The scheduler as TorchX finds it, of a server that has the job `bert` with a pod."""
    api.creates = True
    api.lists |= {MAPS: [], JOBS: [a_job()], PODS: [a_pod(0)]}
    found = get_scheduler_factories()["elasticjob"]("session")
    assert isinstance(found, ElasticJobScheduler)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')\n")
    return code


def torchx(folder: Path, *arguments: str) -> str:
    """Run TorchX's command line in a folder and return its output."""
    call = [sys.executable, "-m", "torchx.cli.main", *arguments]
    done = subprocess.run(call, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifest_of(scheduler: ElasticJobScheduler, app: AppDef, **options: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(str(scheduler.submit_dryrun(app, options)))
    return found


def an_app(**role: Any) -> AppDef:
    app = dist.torchrun(script="train.py", image="torch:1", j="2x1")
    for name, value in role.items():
        setattr(app.roles[0], name, value)
    return app


def test_dryrun_prints_the_manifest_without_a_cluster(folder: Path, api: FakeApi) -> None:
    printed = torchx(folder, "run", "--scheduler", "elasticjob", "--dryrun", *DDP)
    job = yaml.safe_load(printed.partition("=== SCHEDULER REQUEST ===")[2])
    assert re.fullmatch("train-[a-z0-9]{5}", job["metadata"]["name"])
    assert (job["spec"]["replicas"], job["spec"]["nprocPerNode"]) == (2, 3)
    assert "elasticPolicy" not in job["spec"]
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert (trainer["name"], trainer["image"], trainer["workingDir"]) == ("train", "torch:1", "/elasticjob-code/files")
    bash, option, line = trainer["command"]
    assert (bash, option) == ("bash", "-c")
    assert line.startswith("torchrun --rdzv_backend c10d --rdzv_endpoint ${MASTER_ADDR:=localhost}:29500")
    assert line.endswith("train.py --lr 0.1")
    assert trainer["resources"] == {"requests": {"cpu": "2", "memory": "1024Mi"}, "limits": {"memory": "1024Mi"}}
    assert not api.requests


def test_run_creates_the_job_with_its_code_and_cancel_deletes_it(
    folder: Path, api: FakeApi, scheduler: ElasticJobScheduler
) -> None:
    printed = torchx(folder, "run", "-s", "elasticjob", "-cfg", f"namespace={NAMESPACE},queue=research", *DDP)
    handle = next(word for word in printed.split() if word.startswith("elasticjob://"))
    job, (code,) = api.lists[JOBS][-1], api.lists[MAPS]
    name = job["metadata"]["name"]
    assert handle == f"elasticjob://torchx/team:{name}"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert code["metadata"]["name"] == f"{name}-code"
    scheduler.cancel(f"team:{name}")
    assert scheduler.describe(f"team:{name}") is None
    scheduler.cancel(f"team:{name}")
    assert [job["metadata"]["name"] for job in api.lists[JOBS]] == ["bert"]


def test_without_a_workspace_the_image_has_the_code(api: FakeApi, scheduler: ElasticJobScheduler) -> None:
    dryrun = scheduler.submit_dryrun(an_app(), {})
    app_id = scheduler.schedule(dryrun)
    job = api.lists[JOBS][-1]
    assert app_id == f"team:{job['metadata']['name']}"
    assert "annotations" not in job["metadata"]
    pod = job["spec"]["template"]["spec"]
    assert "volumes" not in pod
    assert not {"workingDir", "volumeMounts"} & pod["containers"][0].keys()
    assert not api.lists[MAPS]
    with pytest.raises(SubmitError, match=f"there is a job {job['metadata']['name']} already"):
        scheduler.schedule(dryrun)


def test_what_a_role_asks_for_is_in_the_manifest(scheduler: ElasticJobScheduler) -> None:
    app = an_app(
        name="My_Trainer", min_replicas=1, num_replicas=4, max_retries=7,
        mounts=[VolumeMount("data", "/data", read_only=True)],
        resource=Resource(
            cpu=8, gpu=8, memMB=100, devices={"vpc.amazonaws.com/efa": 4},
            capabilities={"node.kubernetes.io/instance-type": "p5.48xlarge"},
        ),
    )  # fmt: skip
    spec = manifest_of(scheduler, app)["spec"]
    assert spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 4}
    assert spec["failurePolicy"] == {"maxRestarts": 7}
    assert spec["nprocPerNode"] == 1, "as -j says, and not one for each GPU"
    pod = spec["template"]["spec"]
    (trainer,) = pod["containers"]
    assert trainer["name"] == "my-trainer"
    assert trainer["resources"]["limits"] == {"memory": "100Mi", "nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 4}
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert trainer["volumeMounts"] == [{"name": "mount-0", "mountPath": "/data", "readOnly": True}]
    assert pod["volumes"] == [{"name": "mount-0", "persistentVolumeClaim": {"claimName": "data"}}]


def test_a_workspace_of_several_folders_is_shipped_as_one(folder: Path, scheduler: ElasticJobScheduler) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "model.py").write_text("")
    app = an_app(workspace=Workspace({str(folder): "", str(other): "lib"}))
    merged = folder.parent / "merged"
    (merged / "lib").mkdir(parents=True)
    (merged / "lib/model.py").write_text("")
    (merged / "train.py").write_text("print('hello')\n")
    annotations = [
        manifest_of(scheduler, each)["metadata"]["annotations"]
        for each in (app, an_app(workspace=Workspace({str(merged): ""})))
    ]
    assert annotations[0] == annotations[1]


def test_what_an_elasticjob_cannot_do_is_refused(folder: Path, scheduler: ElasticJobScheduler) -> None:
    two = an_app()
    two.roles = two.roles * 2
    with pytest.raises(SubmitError, match="an ElasticJob has one role, and train has 2: train, train"):
        scheduler.submit_dryrun(two, {})
    with pytest.raises(SubmitError, match="uses the macro replica_id"):
        scheduler.submit_dryrun(an_app(args=[macros.replica_id]), {})
    with pytest.raises(SubmitError, match="only volumes"):
        scheduler.submit_dryrun(an_app(mounts=[BindMount("/a", "/b")]), {})
    with pytest.raises(SubmitError, match=r"spec\.replicas"):
        scheduler.submit_dryrun(an_app(num_replicas=0, min_replicas=None), {})
    (folder / "data.bin").write_bytes(os.urandom(MAX_PACKED + 1))
    with pytest.raises(SubmitError, match="--workspace"):
        scheduler.submit_dryrun(an_app(workspace=Workspace({str(folder): ""})), {})
    with pytest.raises(SubmitError, match="ask for combined"):
        scheduler.log_iter("team:bert", "trainer", streams=Stream.STDERR)


def test_a_program_without_torchrun_runs_once_in_each_pod(scheduler: ElasticJobScheduler) -> None:
    assert "nprocPerNode" not in manifest_of(scheduler, utils.echo("hello", num_replicas=2))["spec"]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, AppState.SUBMITTED),
        ({"phase": "Pending"}, AppState.PENDING),
        ({"phase": "Running", "conditions": [condition_of("Running", "True", "R")]}, AppState.RUNNING),
        ({"phase": "Restarting", "conditions": [condition_of("Running", "False", "R")]}, AppState.PENDING),
        ({"phase": "Succeeded", "conditions": [condition_of("Complete", "True", "R")]}, AppState.SUCCEEDED),
        ({"phase": "Failed", "conditions": [condition_of("Failed", "True", "R", "it broke")]}, AppState.FAILED),
    ],
)
def test_the_state_of_a_job(
    api: FakeApi, scheduler: ElasticJobScheduler, status: dict[str, Any], state: AppState
) -> None:
    api.lists[JOBS] = [a_job(status=status)]
    (listed,) = scheduler.list()
    assert (listed.app_id, listed.name, listed.state) == ("team:bert", "bert", state)


def test_a_job_that_torchx_did_not_submit_is_described(api: FakeApi, scheduler: ElasticJobScheduler) -> None:
    container = {"name": "trainer", "image": "i", "command": ["python", "train.py"]}
    api.lists[JOBS] = [a_job(template={"spec": {"containers": [container]}})]
    api.lists[PODS] = [a_pod(0), a_pod(1, phase="Failed"), a_pod(1, incarnation=1)]
    found = scheduler.describe("bert")
    assert found is not None
    assert (found.state, found.num_restarts, found.msg) == (AppState.RUNNING, 1, "Running")
    (role,) = found.roles
    assert (role.name, role.num_replicas, role.entrypoint, role.args) == ("trainer", 2, "python", ["train.py"])
    (statuses,) = found.roles_statuses
    assert [(r.id, r.hostname) for r in statuses.replicas] == [(0, "bert-0-0"), (1, "bert-1-1")]


def test_logs_of_one_replica(api: FakeApi, scheduler: ElasticJobScheduler) -> None:
    api.lists[PODS] = [a_pod(0), a_pod(1), a_pod(1, incarnation=1)]
    api.logs |= {
        "bert-0-0": [f"{stamp(9)} other"],
        "bert-1-0": [f"{stamp(300)} step 1"],
        "bert-1-1": [f"{stamp(200)} step 2", f"{stamp(100)} loss 3"],
    }
    now = datetime.now(timezone.utc)
    assert list(scheduler.log_iter("team:bert", "trainer", 1)) == ["step 1\n", "step 2\n", "loss 3\n"]
    assert list(scheduler.log_iter("team:bert", "trainer", 1, regex="step")) == ["step 1\n", "step 2\n"]
    since, until = now - timedelta(seconds=250), now - timedelta(seconds=150)
    assert list(scheduler.log_iter("team:bert", "trainer", 1, since=since, until=until)) == ["step 2\n"]


def test_a_followed_log_ends_with_the_job(
    api: FakeApi, scheduler: ElasticJobScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "IDLE_SECONDS", 0.01)
    pod = a_pod(0)
    pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    api.lists[PODS] = [pod]
    api.lists[JOBS] = [a_job(status={"conditions": [condition_of("Complete", "True", "R")]})]
    api.logs["bert-0-0"] = [f"{stamp(9)} step 1", f"{stamp(8)} step 2"]
    assert list(scheduler.log_iter("team:bert", "trainer", should_tail=True)) == ["step 1\n", "step 2\n"]

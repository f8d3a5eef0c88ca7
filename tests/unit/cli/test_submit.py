"""`elasticjob submit`: what is created, how the job is followed, and what Ctrl-C does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elasticjob._runtime.contract.shipped_code import CODE_SHA256
from elasticjob.cli.shipping.archive import pack_folder
from elasticjob.cli.verbs.submit import follow, submit
from support.cli.fake_api import JOBS, NAMESPACE, PODS, FakeApi
from support.cli.objects import a_job, a_pod, condition_of, stamp

from .conftest import Run

MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


@pytest.fixture(autouse=True)
def folder(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, in which the command runs, and a server that stores what is created."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')")
    monkeypatch.chdir(code)
    api.lists[MAPS] = []
    api.creates = True
    return code


def ends(api: FakeApi, kind: str, message: str = "") -> None:
    """Let the job have ended when it is read."""
    api.created_status = {"phase": kind, "conditions": [condition_of(kind, "True", "R", message)]}


def test_submit_creates_the_code_and_the_job_that_owns_it(api: FakeApi, run: Run) -> None:
    ends(api, "Complete")
    shown = run("submit", "train.py", "--name", "bert", "--pods", "2", "--image", "i", "-e", "A=1", "--", "--lr", "1")
    assert shown.code == 0, shown.err
    (_, maps, code), (_, jobs, job), (method, owned, owner) = api.changes()
    assert (maps.partition("?")[0], jobs.partition("?")[0], method, owned) == (MAPS, JOBS, "PATCH", f"{MAPS}/bert-code")
    assert code is not None
    assert job is not None
    assert owner is not None
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["python3", "train.py", "--lr", "1"]
    (reference,) = owner["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"], reference["uid"]) == ("ElasticJob", "bert", "uid-bert")
    assert "bert is created in namespace team; its code: 1 file" in shown.err
    assert shown.err.endswith("bert has succeeded\n")
    status = run("status", "bert").out
    assert f"code       sha256 {job['metadata']['annotations']['elasticjob.dev/code-sha256'][:12]}" in status


def test_submit_writes_logs_and_progress_and_ends_with_the_jobs_code(api: FakeApi, run: Run) -> None:
    api.created_status = {
        "phase": "Running", "trainerStatus": {"step": 3, "progressPercentage": 30},
        "conditions": [condition_of("Running", "True", "WorldFormed", "2 nodes train"),
                       condition_of("Failed", "True", "R", "rank 1: ValueError")],
    }  # fmt: skip
    pod = a_pod(0)
    pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1}}
    api.lists[PODS] = [pod]
    api.logs["bert-0-0"] = [f"{stamp()} hello"]
    shown = run("submit", "train.py", "--name", "bert", "--image", "i")
    assert shown.code == 1
    assert shown.out == "hello\n"
    assert "  step 3, 30%\n" in shown.err
    assert "bert has failed: rank 1: ValueError\n" in shown.err


def test_detach_does_not_follow(api: FakeApi, run: Run) -> None:
    shown = run("submit", "train.py", "--name", "bert", "--image", "i", "--detach")
    assert (shown.code, shown.out) == (0, "bert\n")
    assert "elasticjob logs bert -f follows it" in shown.err


def test_dry_run_prints_the_manifests_without_a_cluster(
    api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    shown = run("submit", "train.py", "--image", "i", "-n", "team", "--dry-run")
    code, job = yaml.safe_load_all(shown.out)
    assert (shown.code, code["kind"], job["kind"], api.requests) == (0, "ConfigMap", "ElasticJob", [])
    assert job["metadata"]["namespace"] == "team"
    assert job["metadata"]["name"].startswith("train-")


def test_claims_and_pull_secrets_come_from_flags(api: FakeApi, run: Run) -> None:
    flags = ("--pvc", "data:/data:ro", "--image-pull-secret", "registry")
    shown = run("submit", "train.py", "--image", "i", "-n", "team", "--dry-run", *flags)
    pod = list(yaml.safe_load_all(shown.out))[1]["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["containers"][0]["volumeMounts"][-1] == {"name": "pvc-0", "mountPath": "/data", "readOnly": True}


def test_nothing_is_left_if_the_job_is_refused(api: FakeApi, run: Run) -> None:
    api.refused = {JOBS: (422, "spec: too large")}
    shown = run("submit", "train.py", "--name", "bert", "--image", "i")
    assert (shown.code, shown.err) == (1, "elasticjob submit: create elasticjobs: spec: too large\n")
    assert api.changes()[-1][:2] == ("DELETE", f"{MAPS}/bert-code")


def test_a_name_that_is_taken(api: FakeApi, run: Run) -> None:
    api.lists[JOBS], api.lists[MAPS] = [a_job()], []
    arguments = ("submit", "train.py", "--name", "bert", "--image", "i")
    taken = "there is a job bert already: choose another --name, or end that one first with kubectl delete ej bert"
    assert taken in run(*arguments).err
    owner = {"kind": "ElasticJob", "name": "bert"}
    code = {"name": "bert-code", "labels": {"elasticjob.dev/job-name": "bert"}, "ownerReferences": [owner]}
    api.lists[MAPS] = [{"metadata": code}]
    assert taken in run(*arguments).err
    api.lists[MAPS] = [{"metadata": {"name": "bert-code", "ownerReferences": [{}]}}]
    before = len(api.changes())
    assert "there is a ConfigMap bert-code already" in run(*arguments).err
    assert [method for method, _, _ in api.changes()[before:]] == ["POST"]


def test_code_of_a_submit_that_was_killed_is_replaced(api: FakeApi, run: Run) -> None:
    labels = {"elasticjob.dev/job-name": "bert"}
    api.lists[MAPS] = [{"metadata": {"name": "bert-code", "labels": labels}}]
    assert run("submit", "train.py", "--name", "bert", "--image", "i", "--detach").code == 0
    assert [method for method, _, _ in api.changes()] == ["POST", "DELETE", "POST", "POST", "PATCH"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("none.py",), "none.py: there is no such file"),
        (("../other.py",), "is not in"),
        (("train.py", "--code", "none"), "there is no such folder"),
    ],
)
def test_a_script_that_is_not_shipped(folder: Path, run: Run, arguments: tuple[str, ...], text: str) -> None:
    (folder.parent / "other.py").write_text("")
    shown = run("submit", *arguments, "--image", "i")
    assert (shown.code, text in shown.err) == (64, True), shown.err


def submitted(api: FakeApi) -> str:
    """Let the server have a job of this folder's code, which has been changed since; return the digest of the code."""
    job, pods = a_job(), [a_pod(0), a_pod(1), a_pod(2, phase="Failed")]
    job["metadata"]["annotations"] = {CODE_SHA256: "old"}
    api.lists |= {JOBS: [job], PODS: pods, MAPS: [{"metadata": {"name": "bert-code"}}]}
    return pack_folder(Path.cwd()).digest


def test_update_changes_the_code_then_the_pods_then_the_job(api: FakeApi, run: Run) -> None:
    digest = submitted(api)
    api.lists[MAPS][0]["metadata"]["annotations"] = {CODE_SHA256: digest}
    trains = a_job()
    trains["status"]["rendezvousRound"] = 4
    api.watches[JOBS] = [{"type": "MODIFIED", "object": trains}]
    shown = run("submit", "--update", "bert")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1] == "bert trains with the new code"
    changes = api.changes()
    paths = [path for _, path, _ in changes]
    assert (paths[0], paths[3]) == (f"{MAPS}/bert-code", f"{JOBS}/bert")
    assert sorted(paths[1:3]) == [f"{PODS}/bert-0-0", f"{PODS}/bert-1-0"]
    annotations = [(body or {})["metadata"]["annotations"] for _, _, body in changes]
    assert annotations == [{CODE_SHA256: digest}] * 4


def test_update_without_a_change_changes_nothing(api: FakeApi, run: Run) -> None:
    digest = submitted(api)
    api.lists[JOBS][0]["metadata"]["annotations"] = {CODE_SHA256: digest}
    assert "bert has this code already" in run("submit", "--update", "bert").out
    assert api.changes() == []


def test_two_updates_at_once_are_noticed(api: FakeApi, run: Run) -> None:
    submitted(api)
    api.lists[MAPS][0]["metadata"]["annotations"] = {CODE_SHA256: "of another"}
    shown = run("submit", "--update", "bert", "--detach")
    assert (shown.code, "another update of bert came at the same time" in shown.err) == (1, True)


def test_update_of_pods_that_may_not_be_changed_says_how_long_it_takes(api: FakeApi, run: Run) -> None:
    api.lists[MAPS] = []
    digest = submitted(api)
    api.lists[MAPS][0]["metadata"]["annotations"] = {CODE_SHA256: digest}
    api.refused = {f"{PODS}/bert": (403, "no")}
    shown = run("submit", "--update", "bert", "--detach")
    assert shown.code == 0
    assert "the pods get the code within about 90 s, and not at once: you may not patch pods" in shown.err


def test_jobs_that_cannot_be_updated(api: FakeApi, run: Run) -> None:
    submitted(api)
    api.lists[JOBS][0]["status"]["conditions"] = [condition_of("Complete", "True", "R")]
    assert "bert has ended" in run("submit", "--update", "bert").err
    del api.lists[JOBS][0]["metadata"]["annotations"]
    assert "was not submitted by elasticjob submit" in run("submit", "--update", "bert").err


def interrupts(monkeypatch: pytest.MonkeyPatch, answers: list[str], *, terminal: bool = True) -> None:
    """Let each step of the follower be interrupted, and answer the questions."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.Following, "step", interrupted)
    monkeypatch.setattr(submit, "has_terminal", lambda: terminal)
    monkeypatch.setattr(submit, "ask_user", lambda _question: answers.pop(0))


def test_ctrl_c_asks_and_cancels(api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["\n", "Cancel\n"]
    interrupts(monkeypatch, answers)
    shown = run("submit", "train.py", "--name", "bert", "--image", "i")
    assert (shown.code, answers) == (130, [])
    assert api.changes()[-1][:2] == ("DELETE", f"{JOBS}/bert")
    assert "bert is cancelled" in shown.err


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_detaches_without_a_question_where_there_is_no_terminal(
    api: FakeApi, run: Run, monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    interrupts(monkeypatch, ["d"] if terminal else [], terminal=terminal)
    shown = run("submit", "train.py", "--name", "bert", "--image", "i")
    assert shown.code == 130
    assert "bert goes on without this terminal" in shown.err
    assert all(method != "DELETE" for method, _, _ in api.changes())

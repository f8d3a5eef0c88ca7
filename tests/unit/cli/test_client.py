"""`elasticjob.client`: a script or a function as a job, and the job as an object."""

from __future__ import annotations

import doctest
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob import client
from elasticjob.cli.objects import waiting
from elasticjob.cli.shipping.functions import function_call
from elasticjob.cli.verbs.submit import follow
from support.cli.fake_api import JOBS, NAMESPACE, PODS, FakeApi
from support.cli.objects import a_job, a_pod, condition_of, stamp

MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
COMPLETE = {"phase": "Succeeded", "observedGeneration": 1, "conditions": [condition_of("Complete", "True", "R")]}


@pytest.fixture(autouse=True)
def folder(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a script and a package in it, and a server that has the job `bert`."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "RETRY_AFTER_SECONDS", 0.01)
    code = tmp_path / "code"
    (code / "shipped_package").mkdir(parents=True)
    (code / "train.py").write_text("def train(lr): ...\n")
    (code / "shipped_package/__init__.py").write_text("def at_top(): ...\n")
    (code / "shipped_package/module.py").write_text("def train(lr): ...\nclass A:\n    def method(self): ...\n")
    monkeypatch.chdir(code)
    monkeypatch.syspath_prepend(str(code))
    api.creates, api.created_status = True, COMPLETE
    pod = a_pod(0)
    api.lists |= {MAPS: [], JOBS: [a_job()], PODS: [pod]}
    api.logs["bert-0-0"] = [f"{stamp(9 - step)} [default0]:step {step}" for step in (6, 7)]
    yield code
    for name in [name for name in sys.modules if name.startswith("shipped_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["SubmittedJob", "JobFailedError", "find", "submit"])
def test_the_examples_run(name: str) -> None:
    public: Any = getattr(client, name)
    example = doctest.DocTestParser().get_doctest(public.__doc__, dict(vars(client)), name, None, None)
    assert example.examples
    output: list[str] = []
    assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append).failed, output


def test_public_names_say_what_they_take_and_raise() -> None:
    methods = [
        getattr(client.SubmittedJob, name) for name in ("status", "wait", "logs", "follow", "scale", "update", "cancel")
    ]
    for public in (client.find, client.submit, *methods):
        text = public.__doc__ or ""
        assert "Raises:" in text
        assert ("Args:" in text) == (public.__code__.co_argcount > (public in methods)), public


def command_of(api: FakeApi) -> list[str]:
    command: list[str] = api.lists[JOBS][-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    return command


def test_a_function_is_called_by_its_module(api: FakeApi, folder: Path) -> None:
    from shipped_package.module import train  # type: ignore[import-not-found]

    job = client.submit(train, {"lr": 0.1}, image="i")
    assert job.name.startswith("train-")
    python, option, text, arguments = command_of(api)
    assert (python, option, arguments) == ("python3", "-c", '{"lr": 0.1}')
    assert text == "import json, sys; from shipped_package.module import train; train(**json.loads(sys.argv[1]))"
    assert function_call(train, {}).root == folder.resolve()


def test_a_function_of_a_packages_init_ships_the_folder_above(folder: Path) -> None:
    from shipped_package import at_top  # type: ignore[import-not-found]

    assert function_call(at_top, {}).root == folder.resolve()


def runpy_like(module: types.ModuleType, source: str, file: str) -> None:
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102


def test_a_function_of_the_script_that_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(folder / "train.py")
    runpy_like(main, "def train(lr): ...", main.__file__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    call = function_call(main.train, {})
    assert "from train import train;" in call.command[2]
    assert call.root == folder.resolve()


def test_a_function_without_a_file_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("__main__")
    runpy_like(notebook, "def train(): ...", "<ipython-input-1>")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(client.SubmitError, match=r"train has no file: .* %%writefile train\.py"):
        client.submit(notebook.train, image="i")


def test_functions_and_arguments_that_cannot_be_shipped(folder: Path) -> None:
    from shipped_package.module import A, train

    for function in (lambda: 1, A().method):
        with pytest.raises(client.SubmitError, match="only a function at the top of a file"):
            client.submit(function, image="i")
    with pytest.raises(client.SubmitError, match="must be JSON values"):
        client.submit(train, {"lr": object()}, image="i")
    with pytest.raises(client.SubmitError, match="a dict of keyword arguments"):
        client.submit(train, ["0.1"], image="i")
    with pytest.raises(client.SubmitError, match="a list of texts"):
        client.submit("train.py", "--lr 1", image="i")
    with pytest.raises(client.SubmitError, match="is imported from"):
        client.submit(train, image="i", code=folder / "shipped_package")


def test_claims_and_pull_secrets(api: FakeApi) -> None:
    client.submit("train.py", image="i", pvc=["data:/data:ro", "out:/out"], image_pull_secret="registry")
    pod = api.lists[JOBS][-1]["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["containers"][0]["volumeMounts"][-2:] == [
        {"name": "pvc-0", "mountPath": "/data", "readOnly": True},
        {"name": "pvc-1", "mountPath": "/out"},
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"pvc": "data"}, "^pvc data: want CLAIM:/path, or CLAIM:/path:ro to mount it read-only"),
        ({"image_pull_secret": ["my key"]}, "^image_pull_secret my key: 'my key' is no name of an object"),
        ({"min_pods": 2}, "^pods 1 is not between min_pods 2 and max_pods 1: change one"),
        ({"env": {"A": 1}}, "^env A: want a text, as in '1', and not 1"),
    ],
)
def test_wrong_arguments_are_found_before_a_cluster_is_asked(api: FakeApi, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(client.SubmitError, match=text):
        client.submit("train.py", image="i", kubeconfig="/nowhere", **wrong)
    assert api.requests == []


def test_wait_says_that_the_job_has_failed(api: FakeApi) -> None:
    failed = condition_of("Failed", "True", "R", "rank 1:\n ValueError")
    api.created_status = {"phase": "Failed", "observedGeneration": 1, "conditions": [failed]}
    job = client.submit("train.py", image="i", name="fails")
    with pytest.raises(client.JobFailedError, match="fails has failed: rank 1: ValueError") as caught:
        job.wait()
    assert caught.value.status["phase"] == "Failed"


def test_wait_has_a_limit() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.05 s: bert has ended"):
        client.find("bert").wait(0.05)


def test_cancel_deletes_the_job(api: FakeApi) -> None:
    client.find("bert").cancel()
    assert api.changes()[-1][:2] == ("DELETE", f"{JOBS}/bert")
    with pytest.raises(client.ClusterError, match="not found"):
        client.find("bert")


def test_follow_writes_logs_until_the_end(api: FakeApi) -> None:
    api.lists[JOBS] = [a_job(status=COMPLETE)]
    api.lists[PODS][0]["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    text = io.StringIO()
    assert client.find("bert").follow(text)
    assert text.getvalue() == "[default0]:step 6\n[default0]:step 7\nbert has succeeded\n"

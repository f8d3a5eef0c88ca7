"""Which cluster a command talks to, and one sentence for each error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob.cli import main
from elasticjob.cli.cluster.errors import error_of_response
from support.cli.fake_api import JOBS, FakeApi, write_kubeconfig
from support.cli.objects import a_job
from support.common.ports import free_ports

from .conftest import Run


def test_namespace_and_context_are_chosen_as_kubectl_does(api: FakeApi, run: Run) -> None:
    api.lists[JOBS.replace("/team/", "/elsewhere/")] = [a_job("there")]
    api.lists[JOBS.replace("/team/", "/third/")] = [a_job("flag")]
    assert "there" in run("status", "--context", "other").out
    assert "flag" in run("status", "--context", "other", "-n", "third").out
    shown = run("status", "--context", "nowhere")
    assert shown.code == 64
    assert "has no such context, only here, other" in shown.err


def test_errors_are_one_sentence(api: FakeApi, run: Run, tmp_path: Path) -> None:
    api.refused = {JOBS: (401, "Unauthorized")}
    assert "the API server does not know you: log in again" in run("status").err
    api.refused = {JOBS: (404, "404 page not found")}
    assert "the cluster has no ElasticJobs: install the chart" in run("status").err
    api.refused = {JOBS: (403, "no")}
    assert (run("status").code, run("status").err) == (1, "elasticjob status: you may not list elasticjobs: no\n")
    missing = run("status", "--kubeconfig", str(tmp_path / "none"))
    assert missing.code == 64
    assert "none" in missing.err
    assert missing.err.count("\n") == 1
    (port,) = free_ports(1)
    write_kubeconfig(tmp_path / "down", f"http://127.0.0.1:{port}", "t")
    down = run("status", "--kubeconfig", str(tmp_path / "down"))
    assert down.code == 69
    assert down.err == f"elasticjob status: http://127.0.0.1:{port} does not answer: Connection refused\n"


def test_an_answer_about_a_node_is_said_to_be_about_the_log() -> None:
    answer = b'{"message": "nodes \\"node2\\" not found", "details": {"name": "node2"}}'
    text = str(error_of_response(404, answer, "read the log of pod bert-0-0"))
    assert text == 'read the log of pod bert-0-0: nodes "node2" not found'


def test_long_lists_come_in_pages(api: FakeApi, run: Run) -> None:
    answer = api.answer

    def in_pages(method: str, url: str, body: dict[str, object] | None) -> tuple[int, str]:
        import json

        if "continue=next" in url:
            return 200, json.dumps({"items": [a_job("second")], "metadata": {}})
        return answer(method, url, body)[0], json.dumps({"items": [a_job()], "metadata": {"continue": "next"}})

    api.answer = in_pages  # type: ignore[method-assign]
    assert [job["name"] for job in run("status", "-o", "json").view] == ["bert", "second"]


def test_a_local_run_imports_nothing_that_talks_to_a_cluster() -> None:
    code = (
        "import sys; from elasticjob.cli import main; main(['run', '/no/such.yaml']);"
        "print([m for m in sys.modules if m.startswith(('elasticjob.cli.', 'kubernetes', 'urllib3'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['elasticjob.cli.arguments']"


def test_kubectl_calls_it_by_its_own_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-elasticjob", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("usage: kubectl elasticjob ")

"""The server of the page: who it answers, what it refuses, and that nobody can hold it up."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from elasticjob.cli.cluster.connection import connect_to_cluster
from elasticjob.cli.ui import server as server_module
from elasticjob.cli.ui.feed import JobFeed
from elasticjob.cli.ui.serve import serve_page
from elasticjob.cli.ui.server import PageServer
from elasticjob.cli.views.output import VerbOutput
from support.cli.fake_api import JOBS, PODS, FakeApi
from support.cli.objects import a_job, a_pod

from .conftest import Run

TOKEN = "a-token"


@pytest.fixture
def page(api: FakeApi) -> Iterator[PageServer]:
    api.lists[JOBS] = [a_job()]
    with PageServer(JobFeed(connect_to_cluster(None, None, None), all_namespaces=False), TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(page: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    """Return status, body and headers. `path`: below the token, or from `/` on."""
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=20)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path if path.startswith("/") else f"/{TOKEN}/{path}", headers=names)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers


def test_who_knows_the_token_gets_the_page_and_the_jobs(page: PageServer) -> None:
    status, body, headers = ask(page, "")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for name in re.findall(r'(?:src|href)="([^"#]+)"', body):
        assert ask(page, name)[0] == 200, name
    status, body, headers = ask(page, "api/jobs")
    assert (status, json.loads(body)["jobs"][0]["name"]) == (200, "bert")
    assert json.loads(ask(page, "api/jobs/team/bert")[1])["job"]["phase"] == "Running"
    assert ask(page, "", "HEAD")[1] == ""
    assert page.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", ["/", "/api/jobs", "/a-toke/api/jobs", "/a-tokenx/api/jobs", "/%61-token/api/jobs", "/\u00e9/"]
)
def test_without_the_token_nothing_is_read(page: PageServer, api: FakeApi, path: str) -> None:
    sent = path.encode("latin-1").decode("latin-1")
    with socket.create_connection(("127.0.0.1", page.server_port), timeout=20) as connection:
        connection.sendall(f"GET {sent} HTTP/1.0\r\nHost: 127.0.0.1:{page.server_port}\r\n\r\n".encode("latin-1"))
        assert b" 404 " in connection.recv(100)
    assert api.requests == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.2:{port}", ""]
)
def test_another_name_for_this_machine_is_refused_even_with_the_token(
    page: PageServer, api: FakeApi, host: str
) -> None:
    status, body, _ = ask(page, "api/jobs", Host=host.format(port=page.server_port))
    assert (status, "bert" in body, api.requests) == (403, False, [])
    assert ask(page, "api/jobs", Host=f"localhost:{page.server_port}")[0] == 200


def test_two_hosts_are_refused(page: PageServer) -> None:
    host = f"127.0.0.1:{page.server_port}"
    with socket.create_connection(("127.0.0.1", page.server_port), timeout=20) as connection:
        connection.sendall(f"GET /{TOKEN}/api/jobs HTTP/1.0\r\nHost: {host}\r\nHost: evil\r\n\r\n".encode())
        assert b" 403 " in connection.recv(100)


def test_answers_carry_the_headers_that_keep_scripts_and_frames_out(page: PageServer) -> None:
    for path in ("", "page.js", "api/jobs", "/nothing"):
        headers = ask(page, path)[2]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
        assert (headers["X-Content-Type-Options"], headers["Access-Control-Allow-Origin"]) == ("nosniff", None)
        assert "Server" not in headers


@pytest.mark.parametrize(
    "path",
    ["../server.py", "..%2fserver.py", "server.py", "__init__.py", "page/page.js", "api", "api/jobs/team", "/a-token"],
)
def test_only_the_files_of_the_page_are_served(page: PageServer, path: str) -> None:
    assert ask(page, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(page: PageServer, api: FakeApi, method: str) -> None:
    for path in ("", "api/jobs", "api/jobs/team/bert"):
        assert ask(page, path, method)[0] in (404, 501)
    assert api.changes() == []


def test_stacks_are_only_asked_for_by_the_page_itself(page: PageServer, api: FakeApi) -> None:
    api.lists[PODS] = [a_pod(0)]
    stack = 'Thread 0x1 (most recent call first):\n  File "/app/train.py", line 3 in <module>\n'
    api.outputs["bert-0-0"] = json.dumps({"localRank": 0, "pid": 1, "stacks": stack, "state": ""}) + "\n"
    path = "api/jobs/team/bert/stacks"
    assert ask(page, path)[0] == 404
    assert ask(page, path, "POST")[0] == 404
    assert ask(page, path, "POST", Origin="http://evil.example")[0] == 404
    assert not any("/exec" in url for _, url, _ in api.requests)
    own = f"http://127.0.0.1:{page.server_port}"
    status, body, _ = ask(page, path, "POST", Origin=own)
    (group,) = json.loads(body)["groups"]
    assert (status, group["workers"]) == (200, ["local rank 0 (bert-0-0)"])
    assert "/app/train.py" in group["stack"]
    assert ask(page, path, "POST", Origin=own, Content_Length="5")[0] == 413


def test_errors_of_the_cluster_become_a_sentence(page: PageServer, api: FakeApi) -> None:
    status, body, _ = ask(page, "api/jobs/team/none")
    assert (status, "not found" in json.loads(body)["error"]) == (404, True)
    api.refused = {"/apis/": (500, "etcd is <b>down</b>")}
    status, body, headers = ask(page, "api/jobs")
    assert (status, json.loads(body)["error"]) == (502, "list elasticjobs: etcd is <b>down</b>")
    assert headers["Content-Type"].startswith("application/json")


def test_what_is_no_http_is_refused_without_an_echo(page: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", page.server_port), timeout=20) as connection:
        connection.sendall(b"<script>alert(1)</script> x y z\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer
    assert b"script>" not in answer.partition(b"\r\n\r\n")[2]


def test_connections_that_send_nothing_are_ended_and_hold_up_nobody_for_long(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 3)
    silent = [socket.create_connection(("127.0.0.1", page.server_port), timeout=20) for _ in range(3)]
    silent[0].sendall(b"GET / HT")  # one byte now and then would be no better
    with socket.create_connection(("127.0.0.1", page.server_port), timeout=20) as further:
        assert further.recv(1) == b""  # one too many
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", -1.0)
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 10.0)
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 32)
    assert ask(page, "api/jobs")[0] == 200


def test_the_command_prints_the_address_and_ends_by_ctrl_c(api: FakeApi) -> None:
    command = [sys.executable, "-m", "elasticjob", "ui"]
    environ = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    parts = urlsplit(url)
    assert (parts.scheme, parts.hostname) == ("http", "127.0.0.1")
    assert len(parts.path.strip("/")) == 32
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=20)
    connection.request("GET", f"{parts.path}api/jobs")
    assert json.loads(connection.getresponse().read())["jobs"] == []
    connection.close()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, "until Ctrl-C" in err, "Traceback" in err) == (0, True, False)


def test_without_a_cluster_or_with_a_port_that_is_taken_it_ends_at_once(api: FakeApi, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = run("ui", "--port", str(port))
        assert (shown.code, f"port {port} of 127.0.0.1: Address already in use" in shown.err) == (1, True)
    api.refused = {"/apis/": (401, "Unauthorized")}
    shown = run("ui")
    assert (shown.code, "does not know you" in shown.err, shown.out) == (1, True, "")


def test_the_browser_gets_the_token_by_a_file_of_the_user_and_not_by_its_arguments(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[str, int, str]] = []

    def browse(url: str) -> bool:
        path = Path(unquote(urlsplit(url).path))
        opened.append((url, stat.S_IMODE(path.stat().st_mode), path.read_text()))
        signal.pthread_kill(main, signal.SIGINT)
        return True

    main, before = threading.get_ident(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cluster = connect_to_cluster(None, None, None)
        code = serve_page(cluster, VerbOutput(None), all_namespaces=False, port=0, open_browser=True, browse=browse)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, capsys.readouterr().out.startswith("http://127.0.0.1:")) == (0, True)
    ((url, mode, text),) = opened
    target = re.findall(r"url=(http://127.0.0.1:\d+/\S+/)", text)
    assert (url.startswith("file:///"), mode, len(target)) == (True, 0o600, 1)
    assert not Path(unquote(urlsplit(url).path)).exists()
    assert target[0].rstrip("/").rpartition("/")[2] not in url

"""The page of `elasticjob ui` in a real browser: what it shows, that it stays true, and who can use it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticjob.cli.cluster.connection import connect_to_cluster
from elasticjob.cli.ui.feed import JobFeed
from elasticjob.cli.ui.server import PageServer
from host.debian_packages import has_apt
from host.errors import SetupError
from support.cli.browser import Tab, browser
from support.cli.fake_api import EVENTS, JOBS, PODS, FakeApi, fake_api
from support.cli.objects import a_job, a_pod, an_event, stamp

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
STACK = f'Thread 0x1 (most recent call first):\n  File "/app/train.py", line 3 in {HOSTILE}\n'
FAILURE = {
    "time": stamp(200), "pod": "bert-1-0", "node": "node1", "rank": 3, "class": "OOMKilled", "signal": "SIGKILL",
    "message": f"limit of 1 GiB {HOSTILE}",
    "recoverySeconds": {"detect": 0.01, "stop": 0.2, "rendezvous": 0.05, "start": 0.4},
}  # fmt: skip
CONTRASTS = """
(() => {
  const parts = (color) => color.match(/[0-9.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    const bar = node.classList.contains("inside") ? node.previousElementSibling : null;
    if (bar && getComputedStyle(bar).fill !== "none") return getComputedStyle(bar).fill;
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(0, 0, 0)";
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!own || node.closest(".hidden, .skip, title, noscript, option")) continue;
    const style = getComputedStyle(node);
    const color = node instanceof SVGElement ? style.fill : style.color;
    const [high, low] = [light(color), light(behind(node))].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const name = `${node.nodeName} ${node.getAttribute("class")} ${node.textContent.slice(0, 20)}`;
    if (ratio < 4.5) bad.push(`${name}: ${ratio}`);
  }
  return bad;
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    try:
        with browser(tmp_path_factory.mktemp("browser")) as opened:
            yield opened
    except SetupError as error:
        if os.geteuid() == 0 and has_apt():
            raise
        pytest.skip(str(error))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """A cluster with a job that trains and has had a fault, and two other jobs."""
    with fake_api(tmp_path) as served:
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig))
        job = a_job()
        job["status"] |= {
            "trainerStatus": {"step": 120, "progressPercentage": 40, "metrics": [{"name": HOSTILE, "value": "0.25"}]},
            "recentFailures": [FAILURE], "goodput": {"lostSeconds": 0.7, "percent": 99},
            "stage": {"name": HOSTILE}, "lastRendezvousTime": stamp(199),
        }  # fmt: skip
        degraded = a_job("llama")
        degraded["status"] |= {"phase": "Degraded", "active": 1}
        served.lists[JOBS] = [job, a_job("gpt", status={}), degraded]
        pending = a_pod(2)
        pending["status"] = {"phase": "Pending", "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": HOSTILE}}}
        ]}  # fmt: skip
        served.lists[PODS] = [a_pod(0), a_pod(1, incarnation=1), pending]
        served.lists[EVENTS] = [
            an_event("WorldFormed", "round 2: training on 2 pods with 4 workers", ago=1200),
            an_event("WorkerFailed", HOSTILE, type_="Warning", ago=200),
            an_event("ScalingUp", HOSTILE, ago=900),
        ]
        served.lists["/api/v1/nodes"] = served.lists["/api/v1/namespaces/team/resourcequotas"] = []
        served.outputs["bert-0-0"] = json.dumps({"localRank": 0, "pid": 1, "stacks": STACK, "state": ""}) + "\n"
        yield served


@contextmanager
def page(port: int = 0) -> Iterator[PageServer]:
    """Serve the page."""
    with PageServer(JobFeed(connect_to_cluster(None, None, None), all_namespaces=False), "token", port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def open_job(tab: Tab, server: PageServer) -> None:
    tab.events.clear()
    tab.look(width=1280)
    tab.open("about:blank")
    tab.open(f"{server.url}#/team/bert")
    tab.wait_text("Recovered in 0.66 s")


def complaints(tab: Tab) -> list[Any]:
    """Return what the browser has logged: errors, exceptions, and what the page's policy has refused."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    return [event["params"] for event in tab.events if event["method"] in kinds]


def change_status(api: FakeApi, **fields: Any) -> None:
    api.lists[JOBS][0]["status"] |= fields


def test_what_a_tenant_writes_is_text_and_nothing_leaves_the_machine(tab: Tab, api: FakeApi) -> None:
    with page() as server:
        open_job(tab, server)
        tab.run("document.querySelector('#events summary').click()")
        tab.run("document.querySelector('#stacks button').click()")
        tab.wait_text("1 worker answered")
        text = tab.text()
        for part in (
            "#faults pre",
            "#pods td:last-child",
            "#events",
            "#stacks pre",
            "#training figcaption",
            "#overview, main",
        ):
            assert HOSTILE in tab.run(
                f"[...document.querySelectorAll({part!r})].map((e) => e.textContent).join(' ')"
            ), part
        assert 'File "/app/train.py", line 3' in text
        assert tab.run("document.querySelectorAll('main img, main script, main iframe, [onerror]').length") == 0
        assert tab.run("document.title") == "bert Running – ElasticJobs"
        asked = {e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"}
        assert {url for url in asked if not url.startswith(server.url)} <= {"about:blank"}
        assert complaints(tab) == []
        # Even a mistake of ours could not insert HTML: the policy lets no text become elements or a script.
        assert "TrustedHTML" in tab.run(
            "(() => { try { document.body.innerHTML = '<b>' } catch (e) { return e.message } })()"
        )
        tab.run(
            "const s = document.createElement('script'); s.append('document.title = 1'); document.body.append(s); 0"
        )
        assert tab.run("document.title") == "bert Running – ElasticJobs"


def test_changes_are_shown_and_announced_and_focus_and_open_parts_stay(tab: Tab, api: FakeApi) -> None:
    with page() as server:
        open_job(tab, server)
        tab.run("document.querySelector('#events summary').click()")
        tab.run("document.querySelector('#stacks button').focus(); window.kept = document.activeElement; 0")
        change_status(
            api, phase="Restarting", restarts=2,
            recentFailures=[FAILURE, {**FAILURE, "time": stamp(1), "pod": "bert-0-0", "class": "Killed"}],
        )  # fmt: skip
        tab.wait_text("Restarting")
        assert (
            tab.run("document.querySelector('#said').textContent") == "bert is Restarting; fault: Killed in bert-0-0."
        )
        change_status(api, phase="Running", rendezvousRound=4, lastRendezvousTime=stamp())
        tab.wait("document.querySelector('#said').textContent.includes('round 4 trains with 4 workers')")
        assert tab.run("document.querySelector('#rounds tbody').textContent.includes('Killed of bert-0-0 rank 3')")
        assert tab.run("document.activeElement === window.kept && window.kept.isConnected")
        assert tab.run("document.querySelector('#events details').open")
        assert tab.run("document.querySelectorAll('#time path.fault').length") == 2


def test_what_is_old_is_said_to_be_old(tab: Tab, api: FakeApi) -> None:
    with page() as server:
        open_job(tab, server)
        assert tab.run("document.querySelector('#problem').textContent") == ""
        api.refused = {"/apis/": (500, f"etcd is down {HOSTILE}")}
        tab.wait_text("etcd is down <img")
        assert "What you see is old" in tab.run("document.querySelector('[role=alert]').textContent")
        assert tab.run("document.title").startswith("Old: ")
        assert "Recovered in 0.66 s" in tab.text()
        api.refused = {}
        tab.wait("!document.body.classList.contains('old')")
        assert tab.run("document.querySelector('#problem').textContent") == ""
        port = server.server_port
    tab.wait_text("elasticjob ui does not answer: its command may have ended")
    assert tab.run("document.querySelector('#fresh').textContent").startswith("Old: read ")
    with page(port):
        tab.wait("document.querySelector('#fresh').textContent.startsWith('Live')")
        api.lists[JOBS] = api.lists[JOBS][1:]
        tab.wait_text('"bert" not found')
        assert "What you see is old" in tab.text()


def test_all_of_it_works_by_keyboard(tab: Tab, api: FakeApi) -> None:
    with page() as server:
        tab.look(width=1280)
        tab.open("about:blank")
        tab.open(server.url)
        tab.wait_text("llama")
        reached = []
        while "bert" not in reached:
            tab.press("Tab")
            reached.append(tab.run("document.activeElement.textContent.slice(0, 30)"))
            assert len(reached) < 10, reached
        assert reached[0] == "Skip to the content"
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'title'")
        assert tab.run("document.activeElement.textContent").startswith("team/bert")
        for _ in range(30):
            tab.press("Tab")
            if tab.run("document.activeElement.textContent") == "Show stacks":
                break
        tab.press(" ")
        tab.wait_text("1 worker answered")
        assert tab.run("document.activeElement.textContent") == "Show stacks again"


def test_a_screen_reader_has_landmarks_headings_headers_and_pictures_in_words(tab: Tab, api: FakeApi) -> None:
    with page() as server:
        open_job(tab, server)
        spoken = tab.spoken()
        roles = {role for role, _ in spoken}
        assert {
            "banner",
            "navigation",
            "main",
            "heading",
            "table",
            "columnheader",
            "rowheader",
            "status",
            "alert",
        } <= roles
        headings = [name for role, name in spoken if role == "heading"]
        assert headings[0].startswith("team/bert")
        for title in ("Time line", "Loss and throughput", "Pods", "Rounds", "Faults", "Stacks", "Conditions", "Events"):
            assert title in headings
        pictures = [name for role, name in spoken if role in ("image", "img", "SvgRoot")]
        assert any(name.startswith("Time line: 2 rounds, 1 fault, 4 worker pods.") for name in pictures)
        assert any("now 0.25" in name for name in pictures)
        assert all(name for role, name in spoken if role in ("button", "link", "combobox", "table", "region"))


def test_what_may_not_be_read_is_no_lack_of_it(tab: Tab, api: FakeApi) -> None:
    api.refused = {f"/api/v1/namespaces/team/{kind}": (403, "eve may not") for kind in ("pods", "events")}
    with page() as server:
        open_job(tab, server)
        for part, text in (("#pods", "you may not list pods"), ("#events", "you may not list events")):
            assert text in tab.run(f"document.querySelector('{part}').textContent")
        assert "The job has no pods" not in tab.text()
        api.refused = {"/apis/metrics.k8s.io/": (403, "eve may not")}
        tab.wait_text("pods.metrics.k8s.io: you may not list pods")
        assert "bert-0-0" in tab.run("document.querySelector('#pods').textContent")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_can_be_read_in_both_themes_and_fits_a_narrow_window(tab: Tab, api: FakeApi, width: int, dark: bool) -> None:
    with page() as server:
        open_job(tab, server)
        tab.look(width=width, dark=dark)
        tab.wait(f"document.querySelector('#time svg').clientWidth < {width}")
        assert tab.run(CONTRASTS) == []
        assert tab.run("document.documentElement.scrollWidth") <= width
        background = tab.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
        tab.open(f"{server.url}#/")
        tab.wait_text("llama")
        assert tab.run(CONTRASTS) == []
        assert tab.run("document.documentElement.scrollWidth") <= width

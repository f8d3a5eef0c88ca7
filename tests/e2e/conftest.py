"""One cluster with one installed operator for all end-to-end tests; each test has a namespace of its own.

Several tests run at once, except those with the mark `alone`: they end, cordon or label Nodes, end the operator, or
depend on processor time.
Of the tests that take turns at one thing (mark `takes_turns`) one runs at a time: those at `room` fill the CPUs of all
Nodes, so that a pod waits, and those at `gpus` say how many GPUs a Node has.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import verbs
from support.cluster.images import build_and_load
from support.cluster.install import SYSTEM, install
from support.cluster.jobs import Job, diagnosis
from support.cluster.kube import Json, Kube
from support.cluster.logbook import LogBook


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of-each-file", action="store_true", help="the first selected test of each end-to-end file")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests of this folder; of those that `-m` and `-k` select, leave the first of each file if asked to."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))
    yield
    if config.getoption("one_of_each_file", default=False):
        first = {item.path: item for item in reversed(items)}
        config.hook.pytest_deselected(items=[item for item in items if item is not first[item.path]])
        items[:] = [item for item in items if item is first[item.path]]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the logs of operator, store, agents and pods to the report of a failed test."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    fixtures = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in fixtures:
        report.sections.append(("cluster", diagnosis(fixtures["kube"], fixtures["namespace"], SYSTEM)))


@pytest.fixture(scope="session")
def cluster_dir() -> Path:
    """The cluster's folder: kubeconfig, bin/kubectl, bin/helm."""
    return verbs.up().parent


@pytest.fixture(scope="session")
def locks(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all processes in which tests run at once."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def once(locks: Path) -> Callable[[str, Callable[[], None]], None]:
    """Call a function in one of the processes in which tests run at once; the others wait until it has returned."""

    def call(name: str, function: Callable[[], None]) -> None:
        done = locks / f"{name}.done"
        with (locks / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                function()
                done.touch()

    return call


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, locks: Path) -> Iterator[None]:
    """Wait until no other test has the turn that this test takes (`takes_turns`).

    A lock, not pytest-xdist's groups: xdist 3.8 does not see them with pytest 9.2, and says nothing.
    """
    mark = request.node.get_closest_marker("takes_turns")
    if mark is None:
        yield
        return
    with (locks / f"{mark.args[0]}.turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def bare(cluster_dir: Path, once: Callable[[str, Callable[[], None]], None]) -> Kube:
    """The cluster with the images loaded, before anything is installed."""
    once("images", build_and_load)
    return Kube(cluster_dir / "kubeconfig")


@pytest.fixture(scope="session")
def kube(bare: Kube, cluster_dir: Path, once: Callable[[str, Callable[[], None]], None]) -> Kube:
    """The cluster with the operator installed by its chart, as a user would install it."""
    once("operator", lambda: install(bare, cluster_dir))
    return bare


@pytest.fixture
def namespace(kube: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test, deleted after it."""
    short = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{short}-{uuid.uuid4().hex[:5]}"
    kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    kube.delete("namespaces", name)


@pytest.fixture
def shared_dir() -> Iterator[str]:
    """A directory that all nodes share (they are one machine), for checkpoints."""
    path = Path("/tmp") / f"elasticjob-test-{uuid.uuid4().hex[:8]}"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    yield str(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def gpus(cluster_dir: Path) -> Iterator[Callable[[str, int], None]]:
    """A function that says how many GPUs a Node has; none after the test."""
    touched: set[str] = set()

    def set_gpus(node: str, count: int) -> None:
        touched.add(node)
        verbs.gpus(node, count)

    yield set_gpus
    for node in touched:
        verbs.gpus(node, 0)


@pytest.fixture
def submit(kube: Kube, namespace: str) -> Callable[[Json], Job]:
    """Create a job from a manifest in the test's namespace."""

    def create(body: Json) -> Job:
        kube.create("elasticjobs", body, namespace)
        return Job(kube, namespace, body["metadata"]["name"])

    return create


@pytest.fixture
def follow(kube: Kube, namespace: str) -> Iterator[Callable[[Job], LogBook]]:
    """Follow the logs of a job's workers until the test ends."""
    books: list[LogBook] = []

    def start(job: Job) -> LogBook:
        books.append(LogBook(kube, namespace, job.name).__enter__())
        return books[-1]

    yield start
    for book in books:
        book.__exit__()

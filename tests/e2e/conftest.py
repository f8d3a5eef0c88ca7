"""One cluster and one installed operator for all end-to-end tests, one namespace for each."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import verbs
from support.images import build_and_load
from support.install import SYSTEM, install
from support.jobs import Job, diagnosis
from support.kube import Json, Kube
from support.logbook import LogBook


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(420))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows the logs of operator, store, agents and pods."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    given = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in given:
        report.sections.append(("cluster", diagnosis(given["kube"], given["namespace"], SYSTEM)))


@pytest.fixture(scope="session")
def cluster_dir() -> Path:
    """The cluster's folder: kubeconfig, bin/kubectl, bin/helm."""
    return verbs.up().parent


@pytest.fixture(scope="session")
def bare(cluster_dir: Path) -> Kube:
    """The cluster with our images on it, and nothing installed yet."""
    build_and_load()
    return Kube(cluster_dir / "kubeconfig")


@pytest.fixture(scope="session")
def kube(bare: Kube, cluster_dir: Path) -> Kube:
    """The cluster with the operator installed by its chart, as a user does it."""
    install(bare, cluster_dir)
    return bare


@pytest.fixture
def namespace(kube: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, gone with it."""
    short = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{short}-{uuid.uuid4().hex[:5]}"
    kube.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    kube.delete("namespaces", name)


@pytest.fixture
def shared_dir() -> Iterator[str]:
    """A directory that every node of the cluster sees (they are one machine), for checkpoints."""
    path = Path("/tmp") / f"elasticjob-test-{uuid.uuid4().hex[:8]}"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    yield str(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def submit(kube: Kube, namespace: str) -> Callable[[Json], Job]:
    """Apply a manifest in the test's namespace."""

    def apply(body: Json) -> Job:
        kube.create("elasticjobs", body, namespace)
        return Job(kube, namespace, body["metadata"]["name"])

    return apply


@pytest.fixture
def follow(kube: Kube, namespace: str) -> Iterator[Callable[[Job], LogBook]]:
    """Follow the logs of a job's workers."""
    books: list[LogBook] = []

    def start(job: Job) -> LogBook:
        books.append(LogBook(kube, namespace, job.name).__enter__())
        return books[-1]

    yield start
    for book in books:
        book.__exit__()

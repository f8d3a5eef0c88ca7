"""The cluster of the end-to-end tests, with NetworkPolicies enforced on its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# What the tests of e2e use: their modules run here too.
from e2e.conftest import (  # noqa: F401
    bare,
    cluster_dir,
    follow,
    kube,
    namespace,
    once,
    pytest_runtest_makereport,
    shared_dir,
    submit,
)
from network_policies.enforcer import enforcing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session", autouse=True)
def _enforced(cluster_dir: Path) -> Iterator[None]:  # noqa: F811
    """Enforce NetworkPolicies before the operator is installed, until the last test has ended."""
    with enforcing(cluster_dir / "kubeconfig"):
        yield

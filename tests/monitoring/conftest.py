"""The cluster and the operator of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.conftest import (  # noqa: F401
    bare,
    cluster_dir,
    follow,
    kube,
    namespace,
    pytest_runtest_makereport,
    shared_dir,
    submit,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(420))

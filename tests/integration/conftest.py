"""The time-out of the tests in this folder."""

from pathlib import Path

import pytest

TIMEOUT = 420
"""Seconds. The dearest test takes 110 on an idle machine of two cores. It only ends a test that hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = item.get_closest_marker("timeout")
        if Path(__file__).parent in item.path.parents and (own is None or own.args[0] < TIMEOUT):
            item.add_marker(pytest.mark.timeout(TIMEOUT), append=False)

"""The time-out of the tests in this folder, and the ranks that several files start."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.common.torch_forks import torch_forks
from support.training.wrapper_ranks import Ranks, start_ranks

TIMEOUT = 420
"""Seconds. The dearest test takes 110 on an idle machine of two cores. It only ends a test that hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = item.get_closest_marker("timeout")
        if Path(__file__).parent in item.path.parents and (own is None or own.args[0] < TIMEOUT):
            item.add_marker(pytest.mark.timeout(TIMEOUT), append=False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start ranks as forks. Their parent ends with the file's tests: others count the processes of this one."""
    with torch_forks() as fork:
        yield partial(start_ranks, fork=fork)

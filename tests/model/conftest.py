"""Options: `--deep` explores many more worlds, in minutes instead of seconds; `--quick` runs a sample of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

_QUICK = 40
"""With `--quick`, one of so many tests runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="explore many more interleavings")
    parser.addoption("--quick", action="store_true", help=f"run one of {_QUICK} tests of tests/model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        ours = [item for item in items if Path(__file__).parent in item.path.parents]
        left_out = {item.nodeid for number, item in enumerate(ours) if number % _QUICK}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture
def deep(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--deep", default=False))

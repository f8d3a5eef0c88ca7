"""Options: `--wide` explores many more worlds, in minutes instead of seconds; `--sample` runs a part."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

_SAMPLE = 20
"""With `--sample`, each test runs with its first row and one of so many others, unless it is marked `long_walk`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="explore many more interleavings")
    parser.addoption("--sample", action="store_true", help=f"run one of {_SAMPLE} rows of each test of tests/model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    left_out: set[str] = set()
    if config.getoption("--sample"):
        rows = defaultdict(list)
        left_out = {item.nodeid for item in ours if item.get_closest_marker("long_walk")}
        for item in ours:
            rows[item.nodeid.partition("[")[0]].append(item.nodeid)
        left_out |= {row for same in rows.values() for number, row in enumerate(same) if number % _SAMPLE}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture
def wide(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--wide", default=False))

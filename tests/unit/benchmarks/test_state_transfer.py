"""The figures of a transfer, from the lines of its script."""

from __future__ import annotations

import pytest
from benchmarks.state_transfer import share


def test_the_share_is_the_median_over_pairs_without_the_first() -> None:
    lines = ["pair sync=9.0 plain=0.1", "pair sync=0.5 plain=0.4", "pair sync=0.4 plain=0.4", "pair sync=0.8 plain=0.4"]
    sample = share(["other output", *lines, "all transfers measured"])
    assert sample.value == pytest.approx(80)
    assert sample.parts == pytest.approx({"sync, s": 0.5, "plain, s": 0.4})

"""The names of `elasticjob.inprocess` are imported on first use: some need torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed")

import elasticjob.inprocess

pytestmark = pytest.mark.torch


def test_public_names_are_imported_on_first_use() -> None:
    for name in elasticjob.inprocess.__all__:
        assert getattr(elasticjob.inprocess, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
        _ = elasticjob.inprocess.Unknown

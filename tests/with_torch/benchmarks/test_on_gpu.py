"""Rows whose seconds a GPU changes say how."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.on_gpu import ON_GPU
from benchmarks.registry import ROWS

pytestmark = pytest.mark.torch


def test_each_row_in_process_says_what_a_gpu_adds() -> None:
    assert {row.name for row in ROWS if row.title.startswith("in process: ")} <= ON_GPU.keys()


def test_each_text_is_of_a_row() -> None:
    assert ON_GPU.keys() <= {row.name for row in ROWS}

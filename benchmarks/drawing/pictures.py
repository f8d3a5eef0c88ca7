"""All pictures by name, from the results of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import diagrams, recovery

IMAGES = Path(__file__).parents[2] / "docs/img"
RESULTS = Path(__file__).parents[1] / "results"


def load() -> list[Mapping[str, Any]]:
    """Return all results."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def pictures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the SVG texts."""
    return {
        "failure": diagrams.failure(results),
        "house": diagrams.house(),
        "parts": diagrams.parts(),
        "planned-end": diagrams.planned_end(),
        "recovery": recovery.draw(results),
        "state": diagrams.state(),
        "store": diagrams.store(),
    }

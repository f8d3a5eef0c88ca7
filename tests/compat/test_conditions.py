"""The conditions that a released version documents keep their types, statuses and reasons."""

from __future__ import annotations

import pytest

from compat.keep import CONDITIONS
from compat.versions import VERSIONS, code_of
from support.operator.condition_table import DOCUMENTED, documented_conditions


@pytest.mark.parametrize("version", VERSIONS)
def test_no_condition_of_a_released_version_is_gone(version: str) -> None:
    (page,) = (path for name in CONDITIONS if (path := code_of(version) / name).exists())
    released = documented_conditions(page.read_text())
    assert len(released) > 40
    assert released - DOCUMENTED == set()

"""Sections in which the main thread is not interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticjob.training import critical_section


@pytest.fixture(autouse=True)
def no_section() -> Iterator[None]:
    critical_section.reset()
    yield
    critical_section.reset()


def test_sections_are_nested() -> None:
    critical_section.enter()
    critical_section.enter()
    critical_section.leave()
    assert critical_section.inside()
    critical_section.leave()
    assert not critical_section.inside()


def test_a_leave_after_a_reset_does_not_count() -> None:
    critical_section.enter()
    critical_section.reset()
    critical_section.leave()
    critical_section.enter()
    assert critical_section.inside()

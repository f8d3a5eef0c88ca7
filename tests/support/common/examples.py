"""How many examples a property test runs."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> settings:
    """Return settings for `number` examples in `make deep`, and a quarter of them elsewhere (see tests/conftest.py)."""
    return settings(max_examples=number * settings.get_profile(settings.get_current_profile_name()).max_examples // 100)

"""Property tests check properties of examples. How long an example takes on this machine is none."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings


def test_no_property_test_fails_because_the_machine_is_busy(request: pytest.FixtureRequest) -> None:
    own = {item.nodeid: _own_settings(item) for item in request.session.items}
    for name, chosen in [("the default", settings.default), *own.items()]:
        if chosen is not None:
            assert chosen.deadline is None, name
            assert HealthCheck.too_slow in chosen.suppress_health_check, name


def _own_settings(item: pytest.Item) -> settings | None:
    chosen = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    return chosen if isinstance(chosen, settings) else None

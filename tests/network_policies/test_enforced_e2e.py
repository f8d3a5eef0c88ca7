"""Tests of `tests/e2e` that run here again: faults, recovery and moved state while NetworkPolicies are enforced."""

from __future__ import annotations

import pytest

from e2e.test_faults import (  # noqa: F401
    test_a_node_is_cut_off_and_healed,
    test_a_node_is_killed,
    test_a_pod_is_deleted,
    test_a_spare_takes_the_place_of_a_deleted_pod,
    test_a_worker_is_killed,
    test_the_node_that_has_the_store_is_cut_off_and_healed,
    test_the_store_pod_is_deleted,
)
from e2e.test_policies import (  # noqa: F401
    test_an_eviction_below_min_replicas_is_refused_and_one_above_is_a_planned_end,
)
from e2e.test_restartable import test_processes_survive_a_killed_worker_and_a_deleted_pod  # noqa: F401
from e2e.test_scaling import test_scale_up_and_down_while_training  # noqa: F401
from e2e.test_standby_store import test_the_machine_of_the_store_is_lost  # noqa: F401
from e2e.test_stock_torchrun import test_a_killed_worker_is_recovered_from_every_time  # noqa: F401


@pytest.fixture
def kills() -> int:
    """How many workers of a stock torchrun are killed: one process of each of the two kinds."""
    return 2

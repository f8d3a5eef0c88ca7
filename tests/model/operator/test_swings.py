"""An autoscaler swings for an hour while pods have no node, nodes are lost and the operator restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elasticjob_operator.plan.context import ReconcileContext
from elasticjob_operator.plan.pods import indices
from support.operator import swings as operator_swings
from support.operator.swings import play_swings

Order = Callable[[ReconcileContext, int], tuple[int, bool, int]]
_ORDER = "_order"


def test_an_hour_of_swings_ends_no_pod_that_is_worth_more_than_one_that_stays() -> None:
    ledger = play_swings(0, faults=True)
    assert ledger.broken == []
    assert ledger.done > 3000, "the job hardly trained"


def test_swings_alone_stop_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_swings, "SECONDS", 600.0)
    ledger = play_swings(0, faults=False)
    assert (ledger.broken, ledger.lost) == ([], 0)
    assert ledger.idle < 10


def by_index(ctx: ReconcileContext, index: int) -> tuple[int, bool, int]:
    return 0, False, index


def unplaced_last(ctx: ReconcileContext, index: int) -> tuple[int, bool, int]:
    pod = next((pod for pod in ctx.current_pods if pod.index == index), None)
    return indices.pod_use(ctx, pod), False, index


def idle_like_training(ctx: ReconcileContext, index: int) -> tuple[int, bool, int]:
    pod = next((pod for pod in ctx.current_pods if pod.index == index), None)
    return -min(indices.pod_use(ctx, pod), indices.PodUse.IDLE), False, index


@pytest.mark.parametrize("mutant", [by_index, unplaced_last, idle_like_training], ids=lambda m: m.__name__)
def test_a_wrong_order_is_found(mutant: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, _ORDER, mutant)
    monkeypatch.setattr(operator_swings, "SECONDS", 900.0)
    assert play_swings(0, faults=True).broken

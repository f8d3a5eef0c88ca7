"""The arguments of a `Wrapper`, as its calls read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticjob.inprocess._arguments.times import Times
from elasticjob.inprocess._stores.store_mixin import StoreMixin
from elasticjob.inprocess.abort import Abort
from elasticjob.inprocess.completion import Completion
from elasticjob.inprocess.finalize import Finalize
from elasticjob.inprocess.health_check import HealthCheck
from elasticjob.inprocess.initialize import Initialize
from elasticjob.inprocess.rank_assignment import RankAssignment
from elasticjob.inprocess.rank_filter import RankFilter
from elasticjob.inprocess.terminate import Terminate


@dataclass(eq=False, repr=False, kw_only=True)
class WrapperArguments:
    """Arguments of a `Wrapper`, which has checked them. All calls of its function share the hooks."""

    store_factory: type[StoreMixin]
    store_kwargs: dict[str, Any]
    initialize: Initialize | None
    abort: Abort | None
    completion: Completion | None
    terminate: Terminate | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    rank_assignment: RankAssignment
    rank_filter: RankFilter | None
    times: Times
    monitor_process_logfile: str | None
    enabled: bool

"""Call a distributed function again, in the same processes, after a fault: NVIDIA's in-process restart.

The interface is that of `nvidia_resiliency_ext.inprocess` (NVIDIA Resiliency Extension): the modules on this level have
its names, and docs/contribute/parity.md lists what differs. What they are made of is in the rooms with an
underscore, among them `_restartable`, which is elasticjob's own `@elasticjob.restartable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticjob.inprocess._call.call_wrapper import CallWrapper
    from elasticjob.inprocess._stores.store_mixin import StoreMixin
    from elasticjob.inprocess._threads.interruption import RankShouldRestart
    from elasticjob.inprocess.abort import Abort, AbortTorchDistributed
    from elasticjob.inprocess.attribution import Interruption, InterruptionRecord
    from elasticjob.inprocess.completion import Completion
    from elasticjob.inprocess.composition import Compose, compose
    from elasticjob.inprocess.exception import HealthCheckError, InternalError, RestartAbort, RestartError
    from elasticjob.inprocess.finalize import Finalize, ThreadedFinalize
    from elasticjob.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
    from elasticjob.inprocess.initialize import Initialize, RetryController
    from elasticjob.inprocess.rank_assignment import (
        FillGaps,
        FilterGroupedByKey,
        Layer,
        RankAssignment,
        ShiftRanks,
        StableRanks,
        Tree,
        WholeNodes,
    )
    from elasticjob.inprocess.rank_filter import (
        ActiveWorldSizeDivisibleBy,
        MaxActiveWorldSize,
        RankFilter,
        WorldSizeDivisibleBy,
    )
    from elasticjob.inprocess.state import State, Status
    from elasticjob.inprocess.store import PrefixStore, TCPStore
    from elasticjob.inprocess.terminate import Terminate
    from elasticjob.inprocess.wrapper import Wrapper

_MODULES = {
    "Abort": "abort",
    "AbortTorchDistributed": "abort",
    "ActiveWorldSizeDivisibleBy": "rank_filter",
    "CallWrapper": "_call.call_wrapper",
    "Completion": "completion",
    "Compose": "composition",
    "CudaHealthCheck": "health_check",
    "FaultCounter": "health_check",
    "FillGaps": "rank_assignment",
    "FilterGroupedByKey": "rank_assignment",
    "Finalize": "finalize",
    "HealthCheck": "health_check",
    "HealthCheckError": "exception",
    "Initialize": "initialize",
    "InternalError": "exception",
    "Interruption": "attribution",
    "InterruptionRecord": "attribution",
    "Layer": "rank_assignment",
    "MaxActiveWorldSize": "rank_filter",
    "PrefixStore": "store",
    "RankAssignment": "rank_assignment",
    "RankFilter": "rank_filter",
    "RankShouldRestart": "_threads.interruption",
    "RestartAbort": "exception",
    "RestartError": "exception",
    "RetryController": "initialize",
    "ShiftRanks": "rank_assignment",
    "StableRanks": "rank_assignment",
    "State": "state",
    "Status": "state",
    "StoreMixin": "_stores.store_mixin",
    "TCPStore": "store",
    "Terminate": "terminate",
    "ThreadedFinalize": "finalize",
    "Tree": "rank_assignment",
    "WholeNodes": "rank_assignment",
    "WorldSizeDivisibleBy": "rank_filter",
    "Wrapper": "wrapper",
    "compose": "composition",
}

__all__ = [
    "Abort",
    "AbortTorchDistributed",
    "ActiveWorldSizeDivisibleBy",
    "CallWrapper",
    "Completion",
    "Compose",
    "CudaHealthCheck",
    "FaultCounter",
    "FillGaps",
    "FilterGroupedByKey",
    "Finalize",
    "HealthCheck",
    "HealthCheckError",
    "Initialize",
    "InternalError",
    "Interruption",
    "InterruptionRecord",
    "Layer",
    "MaxActiveWorldSize",
    "PrefixStore",
    "RankAssignment",
    "RankFilter",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "RetryController",
    "ShiftRanks",
    "StableRanks",
    "State",
    "Status",
    "StoreMixin",
    "TCPStore",
    "Terminate",
    "ThreadedFinalize",
    "Tree",
    "WholeNodes",
    "WorldSizeDivisibleBy",
    "Wrapper",
    "compose",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `restartable` and monitor processes need none of these."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value

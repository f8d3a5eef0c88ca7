"""Hook that decides whether a rank may take part in the next iteration."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta

from elasticjob.inprocess._threads.time_limit import run_within
from elasticjob.inprocess.state import State


class HealthCheck(ABC):
    """Called on each rank before the function, and after an interruption.

    An `Exception` after an interruption ends the rank with `HealthCheckError`, and the others continue without it. One
    before the function interrupts all ranks first.
    """

    @abstractmethod
    def __call__(self, state: State, exception: Exception | None) -> object:
        """Raise an exception if the rank is unhealthy. `exception` is what the function raised on this rank."""


class FaultCounter(HealthCheck):
    """Fails when the function has raised more than `max_rank_faults` exceptions on this rank."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        """None: no limit."""
        self._max_rank_faults = max_rank_faults
        self._faults = 0

    def __call__(self, state: State, exception: Exception | None) -> None:
        self._faults += exception is not None
        if self._max_rank_faults is not None and self._faults > self._max_rank_faults:
            raise RuntimeError(f"{self._faults} exceptions on this rank: max_rank_faults={self._max_rank_faults}")


class CudaHealthCheck(HealthCheck):
    """Fails when this rank's CUDA device reports an error, or does not finish its work within `timeout`.

    Its device is the one with the number LOCAL_RANK, or the current one if the launcher sets no LOCAL_RANK. A rank that
    sees one device only, by its CUDA_VISIBLE_DEVICES, has that one.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self._timeout = timeout

    def __call__(self, state: State, exception: Exception | None) -> None:
        import torch

        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return
        local_rank = int(os.environ.get("LOCAL_RANK", -1))
        device = local_rank if 0 <= local_rank < torch.cuda.device_count() else torch.cuda.current_device()
        run_within(
            self._timeout.total_seconds(),
            lambda: torch.cuda.synchronize(device),
            f"CUDA device {device} did not finish its work",
        )

"""Log output of the wrapper, for as long as a wrapped function runs."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType

LOGGER = logging.getLogger("elasticjob.inprocess")
LEVEL_VARIABLE = "ELASTICJOB_INPROCESS_LOG_LEVEL"
"""Environment variable: name of the lowest level that is logged, for example DEBUG."""


class LogSetup:
    """Writes log records to stderr, with the rank. A program that has set logging up itself keeps its own handlers."""

    def __init__(self, rank: int) -> None:
        """ValueError: the variable names no level."""
        level = os.environ.get(LEVEL_VARIABLE, "").upper()
        if level and not isinstance(logging.getLevelName(level), int):
            raise ValueError(f"{LEVEL_VARIABLE}={level}: write DEBUG, INFO, WARNING, ERROR or CRITICAL")
        self._level = LOGGER.level
        self.handler: logging.Handler | None = None
        if not LOGGER.hasHandlers():
            self.handler = logging.StreamHandler(sys.stderr)
            self.handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [rank {rank}] %(message)s"))
            LOGGER.addHandler(self.handler)
        if level:
            LOGGER.setLevel(level)

    def close(self) -> None:
        """Take down what was set up."""
        LOGGER.setLevel(self._level)
        if self.handler is not None:
            LOGGER.removeHandler(self.handler)
            self.handler = None

    def __enter__(self) -> LogSetup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

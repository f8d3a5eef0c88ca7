"""The file with the platform's defaults for jobs: a ConfigMap of the chart, which the kubelet keeps up to date."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from elasticjob_operator import metrics
from elasticjob_operator.model.job.job_defaults import JobDefaults, PlatformDefaults, read_platform_defaults, refuse_all

log = logging.getLogger(__name__)

READ_EVERY = 5.0
"""Seconds between two reads. The kubelet takes up to two minutes to write a change of the ConfigMap to the file."""


class DefaultsFile:
    """The last good defaults of each section of the file. An empty `path`: there are none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._written: str | None = None
        self.current = PlatformDefaults()

    def of(self, namespace: str) -> JobDefaults:
        """Return the defaults of the jobs of a namespace that start now."""
        return self.current.of(namespace)

    async def follow(self) -> None:
        """Read the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(READ_EVERY)
            await self.read()

    async def read(self) -> None:
        """Read what the file has now; log what is refused in it, once."""
        if not self._path:
            return
        # In a thread: a disk, or the check of a long text, may take its time.
        before = self.current
        self.current = await asyncio.to_thread(self._read)
        metrics.job_defaults_refused.set(len(self.current.problems))
        for section, problem in self.current.problems.items():
            if before.problems.get(section) != problem:
                where = f"{self._path}: {section}" if section else self._path
                log.error("%s is refused, and the last good defaults stay: %s", where, problem)
        if self.current != before and not self.current.problems:
            log.info("jobs that start from now on have the defaults of %s", self._path)

    def _read(self) -> PlatformDefaults:
        try:
            written = Path(self._path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._written = None
            return refuse_all(f"it cannot be read: {error}", self.current)
        if written == self._written:
            return self.current
        self._written = written
        try:
            return read_platform_defaults(written, self.current)
        except Exception as error:  # no text of an administrator may end the operator of all jobs
            return refuse_all(f"it cannot be checked: {type(error).__name__}: {error}", self.current)

"""A process that ends what is left of a local run when the run is killed.

The kernel ends the agents and the store with the run, and the workers with their agents (`die_with_parent`). What the
workers have started, such as the processes of a data loader, and the run's folder would stay. On a cluster the end of a
container ends all its processes.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from types import TracebackType

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.local.processes.guardian_main import ENDED
from elasticjob._runtime.system.code_root import python_command

_END_TIMEOUT = 5.0
"""Seconds that the guardian has to end after the run."""


class Guardian:
    """An asynchronous context manager around a run. Leave it when the processes of the run have ended."""

    def __init__(self, run_id: str, scratch: str) -> None:
        """`scratch`: the folder of the run."""
        self._arguments = (run_id, scratch)

    async def __aenter__(self) -> Guardian:
        reader, self._writer = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *python_command("elasticjob._runtime.local.processes.guardian_main", str(reader), *self._arguments),
                # If this run is started by a worker of another one, that one's end must not end the guardian.
                env={name: value for name, value in os.environ.items() if name != Env.RUN_ID},
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(reader,),
                start_new_session=True,  # not of the group that a terminal or a shell kills
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with suppress(BrokenPipeError):  # the guardian was killed
                os.write(self._writer, ENDED)
        os.close(self._writer)
        try:
            await asyncio.wait_for(self._process.wait(), _END_TIMEOUT)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

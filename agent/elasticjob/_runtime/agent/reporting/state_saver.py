"""Save the pod's copy of `elasticjob.State` to the file that the script named, at the end and every few minutes.

The copy ends with the agent. Storage may be slow or hang, so a thread of its own writes the file: the agent waits for
it for a limited time, and its process can end without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from elasticjob._runtime.contract.names import ExitCode
from elasticjob._runtime.contract.snapshot_format import state_file
from elasticjob._runtime.contract.snapshot_format.state_file import BlockChangedError

log = logging.getLogger(__name__)

SAVE_TIMEOUT = 300.0
"""Seconds for the last save; 30 GB at 100 MB/s. A pod that is being deleted has its grace period at most."""
FIRST_CHECK = 60.0
"""Seconds between two checks for a copy that asks to be saved while training continues."""
_ATTEMPTS = 3
"""Saves in a row that may fail because the workers committed twice while the copy was read."""
_LOWEST_PRIORITY = 19


class StateSaver:
    """Saves the newest copy in the memory of this pod."""

    def __init__(self, memory: Sequence[int], saves_while_training: Callable[[], bool]) -> None:
        """`memory`: the descriptors that workers get. `saves_while_training`: true in one pod of the job."""
        self._memory = tuple(memory)
        self._saves_while_training = saves_while_training

    async def save_at_exit(self, code: ExitCode) -> None:
        """Save this pod's copy, which ends with the agent, unless the script has succeeded.

        A script that succeeds has saved what it wants. Its last copy is of an earlier step: the next job with the same
        file would repeat the end of the training.
        """
        if code is not ExitCode.SUCCEEDED:
            await self.save_last()

    async def save_last(self, timeout: float = SAVE_TIMEOUT) -> None:
        """Save the copy, if there is one that is newer than the file. This raises no error, and logs the reason."""
        try:
            await asyncio.wait_for(self._save(background=False), timeout)
        except asyncio.TimeoutError:
            log.warning("training state was not saved: the storage did not accept it within %.0f s", timeout)

    async def run(self, check_interval: float = FIRST_CHECK) -> None:
        """Save as often as the copy asks for, until cancelled."""
        delay = check_interval
        while True:
            await asyncio.sleep(delay)
            interval = self._interval()
            if interval and self._saves_while_training():
                await self._save(background=True)
            delay = interval or check_interval

    def _interval(self) -> float:
        with suppress(OSError, ValueError):
            return state_file.recorded_interval(self._memory)
        return 0.0

    async def _save(self, *, background: bool) -> None:
        try:
            if path := await _in_thread(lambda memory: _save_unchanged(memory, background=background), self._memory):
                log.info("training state saved to %s", path)
        except (OSError, ValueError) as error:
            log.warning("training state was not saved: %s", error)
        except BlockChangedError:
            log.warning("training state was not saved: the script commits twice before the storage has taken a copy")


def _save_unchanged(memory: Sequence[int], *, background: bool) -> str:
    """Save a copy that does not change meanwhile; BlockChangedError if there was none in several attempts."""
    if background:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread only
    for _ in range(_ATTEMPTS - 1):
        with suppress(BlockChangedError):
            return state_file.save_to_recorded_path(memory)
    return state_file.save_to_recorded_path(memory)


async def _in_thread(save: Callable[[Sequence[int]], str], memory: Sequence[int]) -> str:
    """Return what `save` returns in a thread for which the process does not wait at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    # The agent may close the memory before the thread ends.
    own = [os.dup(descriptor) for descriptor in memory]

    def finish(path: str, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(path)
        else:
            future.set_exception(error)

    def work() -> None:
        path, error = "", None
        try:
            path = save(own)
        except Exception as raised:
            error = raised
        for descriptor in own:
            os.close(descriptor)
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, path, error)

    threading.Thread(target=work, daemon=True, name="save-state").start()
    return await future

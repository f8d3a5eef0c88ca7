"""Decode what a job's store sends, so that the store of one tenant does not delay the jobs of all.

A store is a pod of the tenant, and a tenant who can change it has its key. One event loop serves all jobs, and a frame
of 8 MiB may have millions of values, which take seconds and 200 MiB. So a frame has no more values than a job with so
many pods needs, large ones are decoded in another thread, one at a time, and the next one of a link waits for several
times as long as the last one took. Each report replaces the earlier ones. Of those that arrive during a pause only the
newest is decoded, so the pauses never make an honest store look out of date.

The limit counts existing pods and not `maxReplicas`, which a job may set high without having any.

Namespaces take turns with large frames: those of one tenant, over any number of links, delay a frame of another tenant
by one frame only. Small frames do not wait for other links.

Frames that wait stay with their links. All links together hold `store_links.RECEIVED_BYTES`; over it the largest of the
namespace that holds most is closed, and the stores of other tenants lose nothing.

The size of a frame is not limited further: 256 ended rounds with long messages have megabytes of text, which cost
little, and an operator that refused them would never learn of these rounds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.codec import MessageError
from elasticjob._runtime.contract.messages import Message, decode
from elasticjob_operator.kube.limits import ConcurrencyLimit

VALUES = 100_000
"""Values in a frame at most, besides those for each pod: 256 ended rounds have some 10,000, with their failures."""
VALUES_PER_POD = 64
"""At most 24 values describe a pod: 6 as an agent, 15 as an unhealthy one, 3 in lists of names. Another 40 leave room
for ended rounds that name it; a job of less than 400 pods has more room, because it hardly needs `VALUES`. The largest
frame of a job of 4096 pods takes up to 70 MiB and 0.35 s."""
LARGE_FRAME = 64 * 1024
"""Bytes from which on a frame is decoded in a thread and waits for its turn: a smaller one takes a few milliseconds."""
REPORT_SECONDS = 0.05
"""Seconds from one frame to the next, on average."""
PAUSE_FACTOR = 4
"""A frame is followed by a pause of so many times the seconds that it took: a link takes a fifth of a processor."""
BURST_SECONDS = 1.0
"""A link that was quiet may skip this many seconds of pauses: a job that starts sends several reports in a row."""
LONGEST_PAUSE = 5.0
"""Seconds: how long a frame took is unknown where the operator's own host was paused meanwhile."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""A text in JSON."""
_REPORT = b'{"type":"Report"'
"""How `messages.encode` begins a report."""

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="report")
"""A thread of its own: name resolution uses those of the event loop. A second one would decode no faster, because both
need the interpreter's lock, and would take as much memory again."""


_TURNS = ConcurrencyLimit(1)
"""Turns of large frames: one at a time, and by turns of the namespaces that have any."""


@dataclass
class ReportSource:
    """The job whose store sends the reports. It changes while its link is open."""

    namespace: str
    pods: int = 1
    """The most worker pods that it had at a time, since this operator follows it: the reports may still name them."""


@dataclass
class FrameDecoder:
    """Decodes the frames of one link to a store of `source`."""

    source: ReportSource
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Any] = asyncio.sleep
    _free_at: float = 0.0
    """When all pauses so far have ended, by `clock`."""

    async def pause(self) -> None:
        """Wait until the pauses after the earlier frames have ended, but for `BURST_SECONDS` of them."""
        if (wait := self._free_at - BURST_SECONDS - self.clock()) > 0:
            await self.sleep(wait)

    def turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a frame of at most `size` bytes, and hold it while the frame is received and decoded.

        While a large frame waits, its bytes count for its link. A small frame does not wait for other links.
        """
        return nullcontext() if size < LARGE_FRAME else _TURNS.hold(self.source.namespace)

    def is_complete(self, frame: bytes) -> bool:
        """Return whether the frame is a report: it replaces all earlier ones."""
        return frame.startswith(_REPORT)

    async def decode(self, frame: bytes) -> Message:
        """Return the message. MessageError: it is not a message, or has too many values for this job."""
        if len(frame) < LARGE_FRAME:
            began = self.clock()
            message = _decode_bounded(frame, self.source.pods)
            seconds = self.clock() - began
        else:
            loop, pods = asyncio.get_running_loop(), self.source.pods
            message, seconds = await loop.run_in_executor(_THREAD, decode_in_thread, frame, pods)
        pause = min(LONGEST_PAUSE, max(REPORT_SECONDS, PAUSE_FACTOR * seconds))
        self._free_at = max(self._free_at, self.clock()) + pause
        return message


def decode_in_thread(frame: bytes, pods: int) -> tuple[Message, float]:
    """Return the message and the seconds of processor time that it took: waits for other links' frames do not count."""
    began = time.thread_time()
    return _decode_bounded(frame, pods), time.thread_time() - began


def _decode_bounded(frame: bytes, pods: int) -> Message:
    refuse_too_many_values(frame, pods)
    return decode(frame)


def _separators(data: bytes) -> int:
    return sum(map(data.count, (b",", b"[", b"{")))


def refuse_too_many_values(frame: bytes, pods: int) -> None:
    """Raise MessageError if a frame may have more values than a job of so many worker pods needs.

    Commas and brackets are counted: that takes a millisecond for a megabyte, without a parser. Those in texts are left
    out only if they matter, which takes longer.
    """
    values, most = _separators(frame), VALUES + VALUES_PER_POD * pods
    if values > most:
        values -= sum(_separators(found[0]) for found in _TEXT.finditer(frame))
    if values > most:
        raise MessageError(f"the message has {values} values; {most} are allowed for a job of {pods} pods")

"""Whether this node is cut off: it reaches neither the coordinator nor anybody else of its round.

Every node of a round keeps one idle link to the store of the round, on the node of group rank 0; that node sees by
these links whether anybody else is there. Kernel keep-alive watches them, nobody polls. If only the coordinator is
silent the node goes on: the store may be dead. A node that is alone with its round cannot tell the two apart, so a
round of one node is never cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from elasticjob.contract.messages import StartRound
from elasticjob.control_link.link import ControlLink, LinkError, LinkGate, LinkRole, Welcome, connect
from elasticjob.keep_alive import KeepAlive

BACKOFF = 1.0
"""Seconds between attempts to reach the round's store again."""


class ReachabilityMonitor:
    """`cut_off` is called once both are lost for the keep-alive time, which the kernel may have spent already."""

    def __init__(self, run_id: str, key: bytes, keep_alive: KeepAlive, cut_off: Callable[[], None]) -> None:
        self._run_id = run_id
        self._key = key
        self._keep_alive = keep_alive
        self._cut_off = cut_off
        self._coordinator = True
        self._others = True
        self._here: set[ControlLink] = set()
        """Nodes that hold a link to a store of this node."""
        self._round: StartRound | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def gate(self) -> LinkGate:
        """For the store of a round, where it is this node's."""
        return LinkGate(Welcome(self._run_id, 0, 0), {LinkRole.NODE: self._key}, self._serve, self._keep_alive)

    def coordinator_link_changed(self, up: bool, silent: bool) -> None:
        """The control link came up, or was lost; `silent`: only keep-alive told."""
        self._coordinator = up
        self._changed(silent)

    def begin_round(self, start: StartRound) -> None:
        """A round begins."""
        self.end_round()
        if start.group_world_size > 1:
            self._round = start
        if self._round and start.group_rank > 0:
            self._task = asyncio.get_running_loop().create_task(self._keep(start))

    def end_round(self) -> None:
        """It is over, or about to be."""
        self._round, self._others = None, True
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._changed(silent=False)

    # ---- both sides of the links

    async def _keep(self, start: StartRound) -> None:
        while True:
            with contextlib.suppress(OSError, LinkError):
                link = await connect(
                    start.master_addr, start.master_port, role=LinkRole.NODE, key=self._key, run_id=self._run_id,
                    keep_alive=self._keep_alive,
                )  # fmt: skip
                try:
                    self._reached(True, silent=False)
                    await self._until_closed(link)
                finally:
                    link.close()
                self._reached(False, link.lost_by_keep_alive)
            await asyncio.sleep(BACKOFF)

    async def _serve(self, link: ControlLink) -> None:
        self._here.add(link)
        self._reached(True, silent=False)
        try:
            await self._until_closed(link)
        finally:
            self._here.discard(link)
            if self._round and self._round.group_rank == 0:
                self._reached(bool(self._here), link.lost_by_keep_alive)

    async def _until_closed(self, link: ControlLink) -> None:
        with contextlib.suppress(LinkError):
            while await link.receive() is not None:
                pass

    # ---- what follows

    def _reached(self, others: bool, silent: bool) -> None:
        self._others = others
        self._changed(silent)

    def _changed(self, silent: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._round is None or self._coordinator or self._others:
            return
        patience = 0.0 if silent else self._keep_alive.interval * self._keep_alive.max_attempts
        self._timer = asyncio.get_running_loop().call_later(patience, self._cut_off)

"""Detect that this node is cut off: it reaches neither the coordinator nor any other node of its round.

Every node of a round keeps one idle link to the round's store, on the node of group rank 0; that node sees by these
links whether it reaches any other node. TCP keep-alive of the kernel detects a lost link. If only the coordinator is
unreachable the node continues to train: the store may be down. A node that is alone in its round cannot distinguish
the two cases, so it never counts as cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from elasticjob.contract.messages import StartRound
from elasticjob.control_link.link import ControlLink, LinkError, LinkGate, LinkRole, Welcome, connect
from elasticjob.keep_alive import KeepAlive

BACKOFF = 1.0
"""Seconds between attempts to connect to the round's store."""


class ReachabilityMonitor:
    """Calls `cut_off` when the coordinator and all other nodes have been unreachable for the keep-alive time.

    A loss that keep-alive detected has taken that time already; any other loss starts a timer.
    """

    def __init__(self, run_id: str, key: bytes, keep_alive: KeepAlive, cut_off: Callable[[], None]) -> None:
        self._run_id = run_id
        self._key = key
        self._keep_alive = keep_alive
        self._cut_off = cut_off
        self._coordinator_reachable = True
        self._others_reachable = True
        self._links: set[ControlLink] = set()
        """Links of other nodes to the process-group stores of this node."""
        self._round: StartRound | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def gate(self) -> LinkGate:
        """Return the gate through which a process-group store of this node accepts links of other nodes."""
        return LinkGate(Welcome(self._run_id, 0, 0), {LinkRole.NODE: self._key}, self._serve, self._keep_alive)

    def coordinator_link_changed(self, up: bool, by_keep_alive: bool) -> None:
        """Note that the link to the coordinator is up or lost; `by_keep_alive`: keep-alive detected the loss."""
        self._coordinator_reachable = up
        self._update_timer(by_keep_alive)

    def begin_round(self, start: StartRound) -> None:
        """Monitor a round that begins."""
        self.end_round()
        if start.group_world_size > 1:
            self._round = start
        if self._round and start.group_rank > 0:
            self._task = asyncio.get_running_loop().create_task(self._keep_link(start))

    def end_round(self) -> None:
        """Stop monitoring the round: it has ended or is about to."""
        self._round, self._others_reachable = None, True
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._update_timer(by_keep_alive=False)

    # ---- both sides of the links

    async def _keep_link(self, start: StartRound) -> None:
        """Keep a link to the store on group rank 0."""
        while True:
            with contextlib.suppress(OSError, LinkError):
                link = await connect(
                    start.master_addr, start.master_port, role=LinkRole.NODE, key=self._key, run_id=self._run_id,
                    keep_alive=self._keep_alive,
                )  # fmt: skip
                try:
                    self._set_others_reachable(True, by_keep_alive=False)
                    await self._until_closed(link)
                finally:
                    link.close()
                self._set_others_reachable(False, link.lost_by_keep_alive)
            await asyncio.sleep(BACKOFF)

    async def _serve(self, link: ControlLink) -> None:
        """Hold a link that another node keeps to this node's store."""
        self._links.add(link)
        self._set_others_reachable(True, by_keep_alive=False)
        try:
            await self._until_closed(link)
        finally:
            self._links.discard(link)
            if self._round and self._round.group_rank == 0:
                self._set_others_reachable(bool(self._links), link.lost_by_keep_alive)

    async def _until_closed(self, link: ControlLink) -> None:
        with contextlib.suppress(LinkError):
            while await link.receive() is not None:
                pass

    # ---- the decision

    def _set_others_reachable(self, reachable: bool, by_keep_alive: bool) -> None:
        self._others_reachable = reachable
        self._update_timer(by_keep_alive)

    def _update_timer(self, by_keep_alive: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._round is None or self._coordinator_reachable or self._others_reachable:
            return
        delay = 0.0 if by_keep_alive else self._keep_alive.interval * self._keep_alive.max_attempts
        self._timer = asyncio.get_running_loop().call_later(delay, self._cut_off)

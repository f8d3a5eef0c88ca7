"""Detect that this node is cut off: it reaches neither the coordinator nor more than half of its round's nodes.

Every node of a round keeps one idle link to the round's store, on the node of group rank 0. That node counts the links
and, once it is cut off, ends them and accepts no other, so that the nodes at their far ends find themselves cut off as
well. TCP keep-alive of the kernel detects a lost link. If only the coordinator is unreachable the nodes continue to
train: the store may be down. `machine.write_permission` has the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from elasticjob.agent.machine.write_permission import freeze_time, may_write_alone
from elasticjob.contract.messages import CutOffNotice, MemberLink, StartRound
from elasticjob.contract.names import RoundId
from elasticjob.control_link.link import ControlLink, LinkError, LinkGate, LinkRole, Welcome, connect
from elasticjob.keep_alive import KeepAlive

BACKOFF = 1.0
"""Seconds between attempts to connect to the round's store."""
LINK_DELAY = 0.2
LINK_SPACING = 0.001
"""Seconds from the start of a round to the first of these attempts, and more for each group rank: workers form their
process group at that time, over the same store. At most half of the keep-alive time: after all of it, a node without
its link counts as cut off."""


class ReachabilityMonitor:
    """Calls `cut_off` when this node has had no permission to write for the keep-alive time.

    A loss that keep-alive detected has taken that time already; any other loss starts a timer.
    """

    def __init__(self, run_id: str, key: bytes, keep_alive: KeepAlive, cut_off: Callable[[], None]) -> None:
        self._run_id = run_id
        self._key = key
        self._keep_alive = keep_alive
        self._seconds = keep_alive.interval * keep_alive.max_attempts
        self._cut_off = cut_off
        self._coordinator_lost_at: float | None = None
        """When the coordinator became unreachable; loop time, None while it is reachable."""
        self._majority_lost_at: float | None = None
        """Since when the links to other nodes do not suffice to write; loop time, None while they do."""
        self._links: dict[tuple[RoundId, int], ControlLink] = {}
        """Links of other nodes to the stores of this node, by round and group rank."""
        self._has_link = False
        """Whether this node has its link to the round's store on another node."""
        self._is_cut_off = False
        """Whether this node has been cut off in this round, and has not reached a coordinator since."""
        self._round: StartRound | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def gate(self) -> LinkGate:
        """Return the gate through which a process-group store of this node accepts links of other nodes."""
        return LinkGate(Welcome(self._run_id, 0, 0), {LinkRole.NODE: self._key}, self._serve, self._keep_alive)

    def coordinator_link_changed(self, up: bool, by_keep_alive: bool) -> None:
        """Note that the link to the coordinator is up or lost; `by_keep_alive`: keep-alive detected the loss."""
        if up:
            self._coordinator_lost_at, self._is_cut_off = None, False
        elif self._coordinator_lost_at is None:
            self._coordinator_lost_at = self._time_of_loss(by_keep_alive)
        self._update_timer()

    def begin_round(self, start: StartRound) -> None:
        """Monitor a round that begins. Links that do not come up count as lost from now on."""
        self.end_round()
        self._round = start
        self._links_changed(by_keep_alive=False)
        if start.group_rank > 0:
            self._task = asyncio.get_running_loop().create_task(self._keep_link(start))

    def end_round(self) -> None:
        """Stop monitoring the round: it has ended or is about to."""
        self._round, self._majority_lost_at = None, None
        self._has_link = self._is_cut_off = False
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._update_timer()

    # ---- both sides of the links

    async def _keep_link(self, start: StartRound) -> None:
        """Keep a link to the store on group rank 0."""
        await asyncio.sleep(min(LINK_DELAY + start.group_rank * LINK_SPACING, self._seconds / 2))
        while True:
            with contextlib.suppress(OSError, LinkError):
                link = await connect(
                    start.master_addr, start.master_port, role=LinkRole.NODE, key=self._key, run_id=self._run_id,
                    keep_alive=self._keep_alive,
                )  # fmt: skip
                try:
                    link.send(MemberLink(start.round, start.group_rank))
                    self._has_link = True
                    self._links_changed(by_keep_alive=False)
                    refused = await self._until_closed(link)
                finally:
                    link.close()
                self._has_link = False
                # Group rank 0 has waited for the keep-alive time before it ends a link.
                self._links_changed(by_keep_alive=refused or link.lost_by_keep_alive)
            await asyncio.sleep(BACKOFF)

    async def _until_closed(self, link: ControlLink) -> bool:
        """Wait until the link is closed; return whether group rank 0 closed it because it is cut off."""
        refused = False
        with contextlib.suppress(LinkError):
            while (message := await link.receive()) is not None:
                refused = refused or isinstance(message, CutOffNotice)
        return refused

    async def _serve(self, link: ControlLink) -> None:
        """Hold a link that another node keeps to a store of this node."""
        member = await link.receive()
        if not isinstance(member, MemberLink):
            return
        if self._is_cut_off and self._round is not None and member.round == self._round.round:
            link.send(CutOffNotice())
            return
        key = (member.round, member.group_rank)
        self._links[key] = link
        self._links_changed(by_keep_alive=False)
        try:
            await self._until_closed(link)
        finally:
            # The node may have a newer link already.
            if self._links.get(key) is link:
                del self._links[key]
                self._links_changed(link.lost_by_keep_alive)

    # ---- the decision

    def _linked(self) -> set[int]:
        """Return the group ranks of the nodes to which this node has a link."""
        if self._round is None:
            return set()
        ranks = {rank for round_id, rank in self._links if round_id == self._round.round}
        return ranks | ({0} if self._has_link else set())

    def _links_changed(self, by_keep_alive: bool) -> None:
        start = self._round
        if start is None or may_write_alone(start.group_rank, start.group_world_size, self._linked()):
            self._majority_lost_at = None
        elif self._majority_lost_at is None:
            self._majority_lost_at = self._time_of_loss(by_keep_alive)
        self._update_timer()

    def _time_of_loss(self, by_keep_alive: bool) -> float:
        return asyncio.get_running_loop().time() - (self._seconds if by_keep_alive else 0.0)

    def _update_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = freeze_time(self._coordinator_lost_at, self._majority_lost_at, self._seconds)
        if at is not None and not self._is_cut_off:
            self._timer = asyncio.get_running_loop().call_at(at, self._give_up)

    def _give_up(self) -> None:
        """End the links of the other nodes, which then cannot count on this one, and report that it is cut off."""
        self._timer, self._is_cut_off = None, True
        for (round_id, _), link in tuple(self._links.items()):
            if self._round is not None and round_id == self._round.round:
                link.send(CutOffNotice())
                link.close()
        self._cut_off()

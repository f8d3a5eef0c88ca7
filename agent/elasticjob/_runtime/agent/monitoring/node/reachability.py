"""Detect that this agent is cut off: neither the coordinator nor more than half of its round's agents answer.

Every agent of a round keeps one idle link to the round's store, in the pod of group rank 0. That pod's agent counts the
links. Once it is cut off itself, it ends them and accepts no new ones, so that the agents at the other ends find that
they are cut off too. The kernels at both ends of a link exchange keep-alive probes. If only the coordinator is
unreachable, the agents continue to train, because the store may be down. `state_machine.round.write_permission`
decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from types import NoneType

from elasticjob._runtime.agent.state_machine.round.write_permission import permission_end
from elasticjob._runtime.contract.messages import CutOffNotice, MemberLink, StartRound
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.control_link.link import ControlLink, LinkError, LinkGate, LinkRole, Welcome, connect
from elasticjob._runtime.system.loop_errors import background_task
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

BACKOFF = 1.0
"""Seconds between attempts to connect to the round's store."""
TRUST_AFTER_CLOSE = 1.0
"""Seconds for which a coordinator still counts after it has closed its link. Its successor waits as long for this agent
(`rendezvous.state.TAKEOVER_TIMEOUT`)."""
ANSWER_INTERVAL = 0.05
"""Seconds between two polls of the age of the coordinator's last answer, while this agent is cut off."""
LOSSES_TOGETHER = 0.05
"""Seconds within which group rank 0 checks its links once some are lost. Checking 4095 links takes 13 ms, so losses
within this time are handled together."""
LINK_DELAY = 0.2
LINK_SPACING = 0.001
"""Seconds from the start of a round to the first attempt to connect, and the additional seconds for each group rank.
Workers form their process group at that time over the same store, which serves them first
(`StoreServer.expect_agents`). The delay is at most half of the time for which an answer counts, because an agent that
has no link by then counts as cut off."""


class ReachabilityMonitor:
    """Calls `cut_off` when this agent has had no permission to write since the last answers of the others.

    The workers are then frozen until the coordinator says whether the round continues. It says so to every agent that
    connects. If the old link is still up when the coordinator answers again, `greet_again` is called instead.

    `KeepAlive.trusted_seconds` is how long an answer counts. This agent must be frozen before the others begin a round
    without it, and keep-alive itself reports too late for that: this side may notice the loss of a link after the
    coordinator has noticed it, and much later if data was sent in the meantime.
    """

    def __init__(
        self,
        run_id: str,
        key: bytes,
        keep_alive: KeepAlive,
        cut_off: Callable[[], None],
        greet_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_id = run_id
        self._key = key
        self.keep_alive = keep_alive
        self._cut_off = cut_off
        self._greet_again = greet_again
        self.coordinator: ControlLink | None = None
        """The link to the coordinator, while there is one."""
        self._coordinator_until = -math.inf
        """Until when this agent trusts the coordinator, according to the last answer that was checked; loop time."""
        self.round_store_link: ControlLink | None = None
        """The link of this agent to the round's store, while there is one and it is in another pod."""
        self.links: dict[tuple[RoundId, int], ControlLink] = {}
        """Links of other agents to the stores of this agent, by round and group rank."""
        self._is_cut_off = False
        """Whether this agent has been cut off in this round, and has not reached a coordinator since."""
        self._round: StartRound | None = None
        self._ended = RoundId(0, 0, 0)
        """The last round that ended while there was a coordinator."""
        self.start_until = -math.inf
        """Until when links to other agents may still be missing, because the round has just begun; loop time."""
        self._task: asyncio.Task[None] | None = None
        self.next_check: asyncio.TimerHandle | None = None
        """None while nothing that is known can take the permission away."""

    def gate(self) -> LinkGate:
        """Return the gate through which a process-group store of this agent accepts links of other agents."""
        return LinkGate(Welcome(self._run_id, 0, 0), {LinkRole.AGENT: self._key}, self._serve, self.keep_alive)

    def coordinator_link_changed(self, link: ControlLink | None) -> None:
        """Handle a new link to the coordinator, or the loss of the link (None)."""
        lost, self.coordinator = self.coordinator, link
        if link is not None:
            self._is_cut_off = False
        elif lost is not None and not lost.lost_by_keep_alive:
            # The coordinator has closed the link, so its kernel has answered just now.
            self._coordinator_until = self._now() + min(self.keep_alive.trusted_seconds, TRUST_AFTER_CLOSE)
        self.check_within()

    def begin_round(self, start: StartRound) -> None:
        """Monitor a round that begins."""
        self.end_round()
        self._round = start
        self._end_links(lambda round_id: round_id < start.round)
        self.start_until = self._now() + self.keep_alive.trusted_seconds
        if start.group_rank > 0:
            self._task = background_task(self._maintain_link(start))
        self.check_within()

    def end_round(self) -> None:
        """Stop monitoring the round: it has ended or is about to.

        The links of other agents to this one are ended too, so that they do not count on it any more. They stay if this
        agent has no coordinator, because no other round can begin then.
        """
        if self._round is not None and self.coordinator is not None:
            self._ended = self._round.round
            self._end_links(lambda round_id: round_id <= self._ended)
        self._round, self.round_store_link = None, None
        self._is_cut_off = False
        self._set_timer(None)
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # ---- both sides of the links

    async def _maintain_link(self, start: StartRound) -> None:
        """Keep a link to the store on group rank 0."""
        await asyncio.sleep(min(LINK_DELAY + start.group_rank * LINK_SPACING, self.keep_alive.trusted_seconds / 2))
        while True:
            with contextlib.suppress(OSError, LinkError):
                link = await connect(
                    start.master_addr, start.master_port, role=LinkRole.AGENT, key=self._key, run_id=self._run_id,
                    keep_alive=self.keep_alive,
                )  # fmt: skip
                try:
                    link.send(MemberLink(start.round, start.group_rank))
                    self.round_store_link = link
                    await self._until_closed(link)
                finally:
                    link.close()
                self.round_store_link = None
                self.check_within()
            await asyncio.sleep(BACKOFF)

    async def _until_closed(self, link: ControlLink) -> None:
        with contextlib.suppress(LinkError):
            while not isinstance(await link.receive(), (CutOffNotice, NoneType)):
                pass

    async def _serve(self, link: ControlLink) -> None:
        """Hold a link that another agent keeps to a store of this agent."""
        member = await link.receive()
        if not isinstance(member, MemberLink):
            return
        present = self._round.round if self._round is not None else self._ended
        if member.round <= self._ended or member.round < present or (self._is_cut_off and member.round == present):
            link.send(CutOffNotice())
            return
        key = (member.round, member.group_rank)
        self.links[key] = link
        try:
            await self._until_closed(link)
        finally:
            # The other agent may have connected again already.
            if self.links.get(key) is link:
                del self.links[key]
                self.check_within(LOSSES_TOGETHER)

    # ---- the decision

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _trusted_until(self, link: ControlLink) -> float:
        return self._now() - link.seconds_since_answer() + self.keep_alive.trusted_seconds

    def coordinator_end(self) -> float:
        """Return until when this agent trusts the coordinator; loop time."""
        if self.coordinator is not None:
            # A link that is closing at this moment has no age. The time of its last answer counts.
            self._coordinator_until = max(self._coordinator_until, self._trusted_until(self.coordinator))
        return self._coordinator_until

    def _links_of(self, start: StartRound) -> dict[int, ControlLink]:
        """Return the links to other agents, by group rank."""
        links = {rank: link for (round_id, rank), link in self.links.items() if round_id == start.round}
        return links if self.round_store_link is None else {**links, 0: self.round_store_link}

    def check_within(self, seconds: float = 0.0) -> None:
        """Check within so many seconds, only once for all the links that are lost until then."""
        at = self._now() + seconds
        if (
            self._round is not None
            and not self._is_cut_off
            and (self.next_check is None or self.next_check.when() > at)
        ):
            self._set_timer(at)

    def _set_timer(self, at: float | None) -> None:
        if self.next_check is not None:
            self.next_check.cancel()
        self.next_check = None if at is None else asyncio.get_running_loop().call_at(at, self._check)

    def _check(self) -> None:
        """Give up, or check again when this agent's permission to write may end.

        The links to other agents are checked only if the coordinator's last answer is too old.
        """
        start, now, at = self._round, self._now(), self.coordinator_end()
        if start is None:
            return
        if at <= now:
            links = self._links_of(start)
            ends = {rank: self._trusted_until(link) for rank, link in links.items()}
            end = max(permission_end(start.group_rank, start.group_world_size, at, ends), self.start_until)
            if end <= now:
                self._report_cut_off(start)
                return
            at = end - self.keep_alive.resend_window
            if at <= now:
                at = end
                silent = now + self.keep_alive.resend_window
                self._ask(start, [link for rank, link in links.items() if ends[rank] <= silent])
        self._set_timer(at if at < math.inf else None)

    def _ask(self, start: StartRound, links: list[ControlLink]) -> None:
        """Send data over links without an answer: TCP repeats lost data soon, and sends the next probe much later."""
        for link in links:
            link.send(MemberLink(start.round, start.group_rank))

    def _report_cut_off(self, start: StartRound) -> None:
        """Report that this agent is cut off, and end the links of the other agents: they must not count on it now."""
        self._set_timer(None)
        self._is_cut_off = True
        self._end_links(lambda round_id: round_id == start.round)
        self._cut_off()
        self._look_for_answer()

    def _end_links(self, of: Callable[[RoundId], bool]) -> None:
        for (round_id, _), link in tuple(self.links.items()):
            if of(round_id):
                link.send(CutOffNotice())
                link.close()

    def _look_for_answer(self) -> None:
        """Greet the coordinator once it answers again, unless keep-alive ends the link first."""
        if self.coordinator is None or not self._is_cut_off:
            return
        if self.coordinator.seconds_since_answer() < self.keep_alive.trusted_seconds:
            self._is_cut_off = False
            self.check_within()
            self._greet_again()
        else:
            asyncio.get_running_loop().call_later(ANSWER_INTERVAL, self._look_for_answer)

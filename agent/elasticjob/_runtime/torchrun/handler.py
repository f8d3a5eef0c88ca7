"""torch's `RendezvousHandler` over our control link.

torchrun calls `num_nodes_waiting` several times a second. It calls `next_rendezvous` again when the result is not 0 or
when its workers have failed. In torch's dynamic rendezvous every node rewrites one pickled state. Here the coordinator
decides the rounds and sends each node its own part, and it detects lost nodes by their closed connections.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings

from elasticjob._runtime.contract.messages import (
    ANY_INDEX,
    Announce,
    Close,
    Closed,
    Outcome,
    QueryClosed,
    StartRound,
    Termination,
)
from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.control_link.coordinator_client import NoCoordinatorError
from elasticjob._runtime.control_link.link import ControlLink
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive
from elasticjob._runtime.torchrun import BACKEND
from elasticjob._runtime.torchrun.coordinator_query import NoAnswerError, ask_coordinator
from elasticjob._runtime.torchrun.endpoint import NodeDesc, StoreEndpoint
from elasticjob._runtime.torchrun.session import CoordinatorSession
from elasticjob._runtime.torchrun.settings import check_settings
from elasticjob._runtime.torchrun.stores import HostedStore, RoundStoresOfTorch

log = logging.getLogger(__name__)

WITHDRAW_TIMEOUT = 5.0
"""Seconds to wait for the coordinator's confirmation after a join has timed out."""
MAX_STORE_ATTEMPTS = 3
"""Rounds in a row whose store a node does not reach before it gives up. Each of them ends for all nodes."""
_local_ids = itertools.count()


class ElasticJobRendezvousHandler(RendezvousHandler):  # type: ignore[misc]  # torch has no types here
    """The rendezvous handler of one node, with torch's interface. Call it from one thread; its methods block."""

    def __init__(
        self,
        settings: RendezvousSettings,
        endpoint: StoreEndpoint,
        local_addr: str | None = None,
        hosted: HostedStore | None = None,
    ) -> None:
        """`hosted`: the store at `endpoint` if it is a child of this process; it ends with this handler."""
        check_settings(settings)
        self.settings = settings
        self.endpoint = endpoint
        self.hosted = hosted
        self.node = NodeDesc(local_addr or socket.getfqdn(), os.getpid(), next(_local_ids))
        self.session: CoordinatorSession | None = None
        """The session with the coordinator, from the first round on until this handler has ended or lost it."""
        self._closed = ""
        """Why the rendezvous is closed, once this handler has learnt of it: it is never open again."""
        self.stores = RoundStoresOfTorch(self.node.addr, endpoint.read_timeout)

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store of the round. The environment variable is torch's own opt-out."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return str(self.settings.run_id)

    # ---- joining ---------------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class. The join timeout does not run while the node is redundant."""
        caller = "next_rendezvous"
        self._record(caller, f"The agent '{self.node}' attempts to join the next round of '{self.get_run_id()}'.")
        try:
            start, store = self._join()
            info = RendezvousInfo(store, start.group_rank, start.group_world_size, self._bootstrap(start, store))
        except Exception as error:
            self._record_failure(caller, error)
            raise
        if start.group_rank == 0:  # one event for each round
            message = f"Round {start.round} of '{self.get_run_id()}' is complete."
            self._record(caller, message, NodeState.SUCCEEDED)
        message = (
            f"The agent '{self.node}' has joined round {start.round} of '{self.get_run_id()}' as rank "
            f"{start.group_rank} in a world of size {start.group_world_size}."
        )
        self._record(caller, message, rank=start.group_rank)
        return info

    def _join(self) -> tuple[StartRound, Any]:
        if self.session is None and self._closed:
            raise RendezvousClosedError(self._closed)
        port, session = self.stores.serve_next(), self.session
        if session is None:
            session = self._open(port)
        else:
            session.leave_round(port, "torchrun started a new rendezvous; see its log for the reason")
        for attempt in itertools.count(1):
            start = self._wait_for_round(session)
            try:
                store = self.stores.store_of(start, self.get_run_id())
            except RendezvousConnectionError as error:
                log.warning("round %s: %s", start.round, error)
                if attempt == MAX_STORE_ATTEMPTS:
                    raise self._give_up(session, error) from error
                session.leave_round(self.stores.serve_next(), str(error))
                continue
            session.started(start)
            self.stores.end_stores_except(start.master_port)
            return start, store
        raise AssertionError

    def _give_up(self, session: CoordinatorSession, error: RendezvousConnectionError) -> RendezvousConnectionError:
        """Leave for good, so that the other nodes go on, and return the error for torchrun."""
        self._withdraw(session, left_round=str(error))
        problem = f"this agent reached the store of none of {MAX_STORE_ATTEMPTS} rounds in a row, it leaves: {error}"
        return RendezvousConnectionError(problem)

    def _wait_for_round(self, session: CoordinatorSession) -> StartRound:
        timeout = self.settings.timeout.join.total_seconds()
        with session.changed:
            start = self._await_start(session, timeout)
            over = session.termination is not None or bool(session.closed)
            lost = self._patience(session) <= 0
        # Without the lock: the session's thread may need it to end.
        if start is not None:
            return start
        if over:
            raise self._error_of(session)
        if lost:
            raise self._lost_store(session.problem)
        self._withdraw(session)
        raise RendezvousTimeoutError(f"no round included this agent within {timeout:g} s (join_timeout)")

    def _await_start(self, session: CoordinatorSession, timeout: float) -> StartRound | None:
        """Wait for a round. Return None if none will start, the store is lost, or the time is over."""
        deadline = time.monotonic() + timeout
        while session.termination is None and not (session.closed and session.start is None):
            if session.start is not None:
                return session.start
            if session.redundant:
                deadline = time.monotonic() + timeout
            left, patience = deadline - time.monotonic(), self._patience(session)
            if left <= 0 or patience <= 0:
                break
            session.changed.wait(min(patience, threading.TIMEOUT_MAX if session.redundant else left))
        return None

    def _patience(self, session: CoordinatorSession) -> float:
        """Return how many seconds this node still waits for a store that is unavailable."""
        down = session.down_since
        return threading.TIMEOUT_MAX if down is None else down + self.endpoint.read_timeout - time.monotonic()

    def _lost_store(self, problem: str) -> RendezvousConnectionError:
        self.end_session()
        lost = f"the store at {self.endpoint} has been unavailable for {self.endpoint.read_timeout} s"
        return RendezvousConnectionError(f"{lost}: {problem}" if problem else lost)

    def _withdraw(self, session: CoordinatorSession, left_round: str = "") -> None:
        """Withdraw the join and wait for the confirmation, so that no round starts with this node.

        `left_round`: why this node leaves the round that it was assigned to; empty if it was in none.
        """
        session.withdraw()
        if left_round:
            session.leave_round(0, left_round)
        with session.changed:
            session.changed.wait_for(lambda: session.termination is not None, WITHDRAW_TIMEOUT)
        self.end_session()

    def _error_of(self, session: CoordinatorSession) -> RendezvousError:
        """End the session and return the error for torchrun: why no round will start."""
        termination = session.termination or Termination(Outcome.LEFT, "RendezvousClosed", message=session.closed)
        redundant = session.redundant
        self.end_session()
        if termination.outcome is Outcome.ERROR:
            return RendezvousConnectionError(termination.message)
        why = termination.message or termination.reason
        job_ended = termination.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
        self._closed = self._closed or session.closed or (why if job_ended else "")
        if redundant:
            return RendezvousGracefulExitError(f"the rendezvous closed before a round needed this agent: {why}")
        return RendezvousClosedError(why)

    # ---- the store of a round --------------------------------------------------------------------------------------

    def _bootstrap(self, start: StartRound, store: Any) -> RendezvousStoreInfo:
        if self.use_agent_store:
            return RendezvousStoreInfo(start.master_addr, start.master_port)
        return RendezvousStoreInfo.build(start.group_rank, store, local_addr=self.node.addr)

    # ---- while a round runs ----------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round must end, else 0.

        The coordinator decides this: nodes are ready to join, were lost or drained, or their workers failed. Waiting
        nodes that are not ready do not count.
        """
        return int(self.session is not None and self.session.must_stop)

    def is_closed(self) -> bool:
        """See the base class. A handler that has not joined asks the coordinator without becoming a member."""
        try:
            if not self._closed:
                self._closed = self._closed_reason()
            return bool(self._closed)
        except Exception as error:
            self._record_failure("is_closed", error)
            raise

    def _closed_reason(self) -> str:
        """Return why the rendezvous is closed, empty while it is open."""
        session, timeout = self.session, float(self.endpoint.read_timeout)
        if session is None:
            return self._ask(QueryClosed(), connect_timeout=timeout, answer_timeout=timeout)
        with session.changed:
            answered = session.changed.wait_for(lambda: session.messages_received or session.termination, timeout)
        ended = session.termination
        if not answered or (ended is not None and ended.outcome is Outcome.ERROR):
            raise RendezvousConnectionError(f"the coordinator at {self.endpoint} did not answer")
        return session.closed or (ended.message or ended.reason if ended is not None else "")

    def set_closed(self) -> None:
        """See the base class. A replacement of the store keeps the rendezvous closed."""
        try:
            why = f"the agent {self.node} closed the rendezvous"
            if self.session is None:
                self._close_without_joining(why)
            else:
                self.session.close_rendezvous(why)
                self._await_close(self.session)
            self._record_close("set_closed")
        except Exception as error:
            self._record_failure("set_closed", error)
            raise

    def shutdown(self) -> bool:
        """See the base class. Return False if the coordinator is unavailable; raise errors that are not torch's.

        The other nodes continue their round, unless this call handles an exception: torchrun shuts down while it raises
        that of its workers, whose peers would wait for them.
        """
        error = sys.exc_info()[1]
        try:
            self.close_rendezvous(type(error).__name__ if error is not None else "")
            self._record_close("shutdown")
        except RendezvousError as problem:
            message = f"The agent '{self.node}' failed to shut down '{self.get_run_id()}': {problem}"
            self._record("shutdown", message, NodeState.FAILED)
            log.warning("%s", message)
            return False
        except Exception as problem:
            self._record_failure("shutdown", problem)
            raise
        finally:
            self.end_session()
            self.stores.clear()
            if self.hosted is not None:
                self.hosted.close()
        return True

    def close_rendezvous(self, failure: str) -> None:
        """Close the rendezvous and leave it. `failure`: the error that ends this node; empty without one."""
        why = f"the agent {self.node} {f'failed ({failure}) and ' if failure else ''}closed the rendezvous"
        session = self.session
        if session is None:
            self._close_without_joining(why)
            return
        with session.changed:
            ends_round = bool(failure) and session.start is not None and not session.round_ending
        session.shut_down(why, f"the agent failed: {failure}" if failure else "")
        self._await_close(session, ends_round=ends_round)

    def _close_without_joining(self, why: str) -> None:
        """Close the rendezvous although this process has not joined it; return at once if it is closed."""
        if not self._closed:
            timeout = self.settings.timeout
            self._closed = self._ask(
                Close(why),
                connect_timeout=timeout.heartbeat.total_seconds(),
                answer_timeout=timeout.close.total_seconds(),
            )
        if not self._closed:
            raise RendezvousError(
                f"the coordinator at {self.endpoint} has an operator, which decides when the job ends"
            )

    def _await_close(self, session: CoordinatorSession, *, ends_round: bool = False) -> None:
        """Wait until the rendezvous is closed; with `ends_round`, until the coordinator has also ended the round."""
        deadline = time.monotonic() + self.settings.timeout.close.total_seconds()
        heartbeat = self.settings.timeout.heartbeat.total_seconds()
        with session.changed:
            while not (session.termination or (session.closed and (session.round_ending or not ends_round))):
                now = time.monotonic()
                if session.down_since is not None and now >= session.down_since + heartbeat:
                    raise RendezvousConnectionError(f"the store at {self.endpoint} is unavailable")
                if now >= deadline:
                    raise RendezvousTimeoutError("the coordinator did not close the rendezvous within close_timeout")
                session.changed.wait(min(heartbeat, deadline - now))
        if session.termination is not None and session.termination.outcome is Outcome.ERROR:
            raise RendezvousConnectionError(session.termination.message)
        self._closed = self._closed or session.closed or "the job has ended"

    def _ask(self, message: Close | QueryClosed, *, connect_timeout: float, answer_timeout: float) -> str:
        """Ask the coordinator without joining. Return why the rendezvous is closed, empty while it is open."""
        try:
            answer = ask_coordinator(
                self._dial(), message, connect_timeout=connect_timeout, answer_timeout=answer_timeout
            )
        except NoCoordinatorError as error:
            raise RendezvousConnectionError(f"the store at {self.endpoint} is unavailable: {error}") from error
        except NoAnswerError as error:
            problem = f"the coordinator at {self.endpoint} did not answer within {answer_timeout:g} s"
            raise RendezvousTimeoutError(problem) from error
        return answer.reason if isinstance(answer, Closed) else ""

    # ---- the link --------------------------------------------------------------------------------------------------

    def _dial(self) -> Callable[[], Awaitable[ControlLink]]:
        """Return a function that opens a link. It must not refer to the handler, see `_open`."""
        settings, endpoint, run_id = self.settings, self.endpoint, self.get_run_id()
        keep_alive = KeepAlive(settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt)
        return lambda: endpoint.dial(run_id, keep_alive)

    def _open(self, store_port: int) -> CoordinatorSession:
        index = os.environ.get(Env.INDEX, "")
        announcement = Announce(
            index=int(index) if index.isdigit() else ANY_INDEX,
            incarnation=int(os.environ.get(Env.INCARNATION) or 0),
            agent_id=f"{self.node}_{time.time_ns()}",
            pod=os.environ.get(Env.POD_NAME) or str(self.node),
            address=self.node.addr,
            store_port=store_port,
            local_world_size=1,
        )
        session = CoordinatorSession(self._dial(), announcement, connect_timeout=float(self.endpoint.read_timeout))
        self.session = session
        # The session's thread must not refer to the handler: a dropped handler is collected, and its session ends.
        self._end = weakref.finalize(self, session.close)
        return session

    def end_session(self) -> None:
        if self.session is not None:
            self._end()
            self.session = None

    def _record_close(self, caller: str) -> None:
        self._record(caller, f"The agent '{self.node}' has closed '{self.get_run_id()}'.", NodeState.SUCCEEDED)

    def _record_failure(self, caller: str, error: Exception) -> None:
        self._record(caller, f"{type(error).__name__}: {error}", NodeState.FAILED)

    def _record(self, caller: str, message: str, state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        """Log a message and record torch's event of it, named after the method that torch called."""
        log.info("%s", message)
        construct_and_record_rdzv_event(
            name=f"{type(self).__name__}.{caller}", run_id=self.get_run_id(), message=message, node_state=state,
            hostname=self.node.addr, pid=self.node.pid, local_id=self.node.local_id, rank=rank,
        )  # fmt: skip

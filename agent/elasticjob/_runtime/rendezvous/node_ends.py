"""Nodes whose end is announced with a time: the agents there are sent how many seconds are left. Pure.

The operator sends times of its own clock, and the time of that clock at which it sends them. The coordinator adds their
difference to its own clock, and each agent adds what is left to its own. So clocks of different hosts are not compared,
and the result is late by at most the time that the messages need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticjob._runtime.contract.messages import MachineEnd, OperatorView
from elasticjob._runtime.rendezvous.state import CoordinatorState, KnownAgent, SendToAgent

EARLIER_SECONDS = 0.5
"""A known time changes only if a view names one that is earlier by more: views differ by their time on the way."""


def receive_ends(state: CoordinatorState, view: OperatorView, now: float) -> CoordinatorState:
    """Return the state with the ends that a view names.

    A known end never becomes later: an operator that has just started may have seen the announcement later than the one
    before it.
    """
    if view.ending_pods is None:
        return state
    ends = {pod.pod: now + pod.time - view.sent_at for pod in view.ending_pods}
    known = {pod: at for pod, at in state.node_ends.items() if pod in ends and ends[pod] > at - EARLIER_SECONDS}
    return replace(state, node_ends={**ends, **known})


def changed_ends(before: CoordinatorState, after: CoordinatorState, now: float) -> tuple[SendToAgent, ...]:
    """Return the messages to the connected agents for whose Node the known end has changed."""
    if before.node_ends == after.node_ends:
        return ()
    agents = (n for n in after.agents.values() if before.node_ends.get(n.pod) != after.node_ends.get(n.pod))
    return _messages(after, agents, now)


def known_ends(state: CoordinatorState, agents: Iterable[KnownAgent], now: float) -> tuple[SendToAgent, ...]:
    """Return the messages to those agents that are connected and whose Node ends at a known time.

    An agent also gets a message if it knows an end that was withdrawn.
    """
    named = state.operator_view.ending_pods is not None
    concerned = (n for n in agents if n.pod in state.node_ends or (named and n.knows_machine_end))
    return _messages(state, concerned, now)


def _messages(state: CoordinatorState, agents: Iterable[KnownAgent], now: float) -> tuple[SendToAgent, ...]:
    connected = (n for n in agents if n.disconnected_at is None)
    return tuple(SendToAgent(n.agent_id, MachineEnd(_seconds_left(state, n.pod, now))) for n in connected)


def _seconds_left(state: CoordinatorState, pod: str, now: float) -> float | None:
    at = state.node_ends.get(pod)
    return None if at is None else max(0.0, at - now)

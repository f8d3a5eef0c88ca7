"""What happens to a coordinator (events), and what it does (effects)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    CoordinatorToAgent,
    OperatorView,
    StoreToAgent,
)


@dataclass(frozen=True)
class AgentMessage:
    """An agent sent a message. The first one of a connection is its `Announce`."""

    agent_id: str
    message: AgentToCoordinator


@dataclass(frozen=True)
class AgentDisconnected:
    """The link of an agent closed."""

    agent_id: str


@dataclass(frozen=True)
class OperatorViewReceived:
    """The operator sent its view."""

    view: OperatorView


@dataclass(frozen=True)
class Tick:
    """The time that `rounds.next_deadline` returned has come."""


@dataclass(frozen=True)
class NewerStoreSeen:
    """An agent reported that it has connected to a store of a higher incarnation."""

    incarnation: int


CoordinatorEvent: TypeAlias = AgentMessage | AgentDisconnected | OperatorViewReceived | NewerStoreSeen | Tick


@dataclass(frozen=True)
class SendToAgent:
    """Send a message to an agent. If its link is down, the answer to its next `Announce` makes up for the message."""

    agent_id: str
    message: CoordinatorToAgent | StoreToAgent

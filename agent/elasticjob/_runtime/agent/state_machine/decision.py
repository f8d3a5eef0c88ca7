"""What the agent decides on one event."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob._runtime.agent.state_machine.effects import Effect
from elasticjob._runtime.agent.state_machine.state import AgentState


@dataclass(frozen=True)
class AgentDecision:
    """The state after an event, and the effects to carry out, in order."""

    state: AgentState
    effects: tuple[Effect, ...] = field(default=())

    def after(self, *effects: Effect) -> AgentDecision:
        """Return the same decision with these effects in front of its own."""
        return AgentDecision(self.state, effects + self.effects)

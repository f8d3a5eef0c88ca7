"""How long a coordinator waits for what it cannot know."""

from __future__ import annotations

RECONNECT_GRACE = 0.25
"""Seconds that an agent has to reconnect after its link closed, before it counts as lost."""


RECOVERY_TIMEOUT = 10.0
"""Seconds that a successor store waits for the agents of a round, from the first agent's announcement."""


LOST_TIMEOUT = 1.0
"""The same for pods on a lost Node. Agents that lose their store try to reconnect once a second."""


TAKEOVER_TIMEOUT = 1.0
"""Seconds without an announcement after which a standby store that has taken over stops waiting. The agents lose the
old store together; where only keep-alive notices it, within one interval of the probes."""


BREAK_TIMEOUT = 10.0
"""Seconds beyond the grace period after which a member that still counts steps is lost, if others wait for that. Its
agent has killed its workers by then."""


STOP_TIMEOUT = 30.0
"""Seconds beyond the grace period after which a member that has not reported its workers stopped counts as lost."""

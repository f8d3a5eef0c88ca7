"""Stop the workers of this pod."""

from __future__ import annotations

from dataclasses import replace

from elasticjob._runtime.agent.state_machine.decision import AgentDecision
from elasticjob._runtime.agent.state_machine.effects import StopWorkers
from elasticjob._runtime.agent.state_machine.state import AgentState, Stopping
from elasticjob._runtime.contract.messages import Finish, StartRound

KILL = StopWorkers(0.0, at_once=True)


def begin_stop(
    state: AgentState,
    grace: float,
    *,
    graceful: bool = False,
    dump_stacks: bool = False,
    then: StartRound | Finish | None = None,
) -> AgentDecision:
    """Stop the workers, and act on the message `then` once none is left.

    A second stop changes the grace only if it is urgent and the first one was graceful: other agents may train by then.
    """
    stopping = state.stopping or Stopping()
    then = then or stopping.then
    if state.stopping is not None and (graceful or not stopping.graceful):
        return AgentDecision(replace(state, activity=replace(stopping, then=then)))
    # Frozen workers get SIGKILL only: neither a SIGTERM handler nor the end of a function must write anything.
    for_good = state.leave is not None or isinstance(then, Finish)
    stop = KILL if state.frozen else StopWorkers(grace, for_good=for_good, dump_stacks=dump_stacks)
    return AgentDecision(replace(state, activity=replace(stopping, graceful=graceful, then=then)), (stop,))

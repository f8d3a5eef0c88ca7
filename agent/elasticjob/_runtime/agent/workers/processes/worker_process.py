"""The states of a worker's process, and what may happen in each. Pure: `next_state(state, event)` is the whole machine.

    between rounds                           in a round

                          CALL         START_OVER           AT_FUNCTION
    LOADING ─────────┬──────────► CALLED ─────► RUNNING ─────────────────► RETURNED
      │ AT_FUNCTION  │                          │    ▲                        │  ▲
      ▼              │                INTERRUPT ▼    │ GRACE_OVER             │  │ AT_FUNCTION
    PARKED ──────────┤                        INTERRUPTED ──────────────────────┘
      ▲              │                                                       │
      └───────────────────────────────────── PARK ───────────────────────────┘
                     │
    SPARE_LOADING    │  TAKE_PLACE: a spare process becomes the process that its rank lacks (LOADING or PARKED)
      │ AT_FUNCTION  │  JOIN_STOP: a process between rounds ends together with those of the round
      ▼              │             (LOADING becomes RUNNING, PARKED becomes RETURNED)
    SPARE ───────────┘

    DISCARD, EXITS ──► EXITING    KILL ──► KILLED    ABANDON ──► ABANDONED    REAPED (from anywhere) ──► ENDED
    HAND_OVER: a RUNNING process leaves the table, because a launcher below it waits for the ranks of the round

A process whose function can be called again is *parked* while it waits at that function. LOADING and SPARE_LOADING run
the script up to it, or have lost their connection. A process is *exiting* while the kernel frees what it holds (its
program runs no more), and has *ended* once it is reaped.

Events that the agent causes are refused where they make no sense: `ImpossibleEventError` is an error of the agent.
What a process reports, or the kernel of it, may come at any time: where it says nothing new the state stays.
"""

from __future__ import annotations

from enum import Enum


class ProcessState(str, Enum):
    """The state of one process; the module has the diagram."""

    LOADING = "loading"
    """It was prestarted, before it has a round, and is not at its function."""
    PARKED = "parked"
    """It waits at its function for the next round."""
    SPARE_LOADING = "spare loading"
    """Beside the process of its rank, a second one runs the script up to the function."""
    SPARE = "spare"
    """This second process waits at the function."""
    CALLED = "called"
    """It calls its function in a round whose start is not over; what it reports is repeated once that is."""
    RUNNING = "running"
    """It takes part in a round."""
    RETURNED = "returned"
    """Its function has ended in this round, and it can be called again."""
    INTERRUPTED = "interrupted"
    """It was asked to leave its function, because the round is stopped, and has not yet."""
    KILLED = "killed"
    """It was killed outside of a round. Only a stop waits until it has ended."""
    EXITING = "exiting"
    """Its program runs no more, or was killed, and the kernel frees what it holds. New workers may wait for that."""
    ABANDONED = "abandoned"
    """It has survived SIGKILL for so long that the agent waits no more."""
    ENDED = "ended"
    """It is reaped, or has left the table."""


class ProcessEvent(str, Enum):
    """What happens to a process."""

    CALL = "call"
    """Agent: call your function in the next round."""
    START_OVER = "start over"
    """Agent: all workers of the round have started."""
    INTERRUPT = "interrupt"
    """Agent: leave your function."""
    GRACE_OVER = "grace over"
    """Agent: it is not waited for any longer."""
    PARK = "park"
    """Agent: the round has ended for it, and its process stays for the next one."""
    TAKE_PLACE = "take place"
    """Agent: a spare process becomes its rank's process."""
    JOIN_STOP = "join stop"
    """Agent: a process between rounds ends together with the processes of the round."""
    DISCARD = "discard"
    """Agent: it is killed, and new workers may have to wait until it has ended."""
    KILL = "kill"
    """Agent: it is killed."""
    HAND_OVER = "hand over"
    """Agent: a launcher below it waits for its ranks, which are the processes of the round now (`CommandProcess`)."""
    ABANDON = "abandon"
    """Agent: it is not waited for any longer, although it was killed."""
    AT_FUNCTION = "at function"
    """Process: it is at its function, or its function has ended, and it waits to be called."""
    NOT_AT_FUNCTION = "not at function"
    """Process: it does not wait to be called (any more): it runs its function, or has closed its connection."""
    EXITS = "exits"
    """Kernel: its program runs no more, and it cannot be reaped yet."""
    REAPED = "reaped"
    """Kernel: it is gone, and so is all that it held."""


class ImpossibleEventError(Exception):
    """The agent has done to a process what makes no sense in its state."""


LOADING, PARKED = ProcessState.LOADING, ProcessState.PARKED
SPARE_LOADING, SPARE = ProcessState.SPARE_LOADING, ProcessState.SPARE
CALLED, RUNNING, RETURNED = ProcessState.CALLED, ProcessState.RUNNING, ProcessState.RETURNED
INTERRUPTED, EXITING, KILLED = ProcessState.INTERRUPTED, ProcessState.EXITING, ProcessState.KILLED
ABANDONED, ENDED = ProcessState.ABANDONED, ProcessState.ENDED

INITIAL = frozenset({RUNNING, LOADING, SPARE_LOADING})
"""In these a process is started."""
FOR_NEXT_ROUND = frozenset({LOADING, PARKED})
"""The processes that take part in the next round; at most one of a rank."""
SPARES = frozenset({SPARE_LOADING, SPARE})
IN_ROUND = frozenset({RUNNING, RETURNED, INTERRUPTED})
"""The processes of the present round; at most one of a rank."""

REPORTS = frozenset({ProcessEvent.AT_FUNCTION, ProcessEvent.NOT_AT_FUNCTION, ProcessEvent.EXITS})
"""What may come at any time. REAPED may too, once."""

_TRANSITIONS: dict[tuple[ProcessState, ProcessEvent], ProcessState] = {
    (LOADING, ProcessEvent.CALL): CALLED,  # the message waits for it
    (PARKED, ProcessEvent.CALL): CALLED,
    (SPARE, ProcessEvent.CALL): CALLED,
    (CALLED, ProcessEvent.START_OVER): RUNNING,
    (RUNNING, ProcessEvent.INTERRUPT): INTERRUPTED,
    (RUNNING, ProcessEvent.HAND_OVER): ENDED,
    (RETURNED, ProcessEvent.INTERRUPT): RETURNED,  # it has left already
    (INTERRUPTED, ProcessEvent.GRACE_OVER): RUNNING,
    (RETURNED, ProcessEvent.PARK): PARKED,
    (SPARE_LOADING, ProcessEvent.TAKE_PLACE): LOADING,
    (SPARE, ProcessEvent.TAKE_PLACE): PARKED,
    (LOADING, ProcessEvent.JOIN_STOP): RUNNING,
    (PARKED, ProcessEvent.JOIN_STOP): RETURNED,
    **{(state, ProcessEvent.DISCARD): EXITING for state in FOR_NEXT_ROUND | SPARES},
    **{(state, ProcessEvent.KILL): KILLED for state in FOR_NEXT_ROUND | SPARES},
    **{(state, ProcessEvent.ABANDON): ABANDONED for state in IN_ROUND | {CALLED, KILLED, EXITING}},
    (LOADING, ProcessEvent.AT_FUNCTION): PARKED,
    (SPARE_LOADING, ProcessEvent.AT_FUNCTION): SPARE,
    (RUNNING, ProcessEvent.AT_FUNCTION): RETURNED,
    (INTERRUPTED, ProcessEvent.AT_FUNCTION): RETURNED,
    (PARKED, ProcessEvent.NOT_AT_FUNCTION): LOADING,
    (SPARE, ProcessEvent.NOT_AT_FUNCTION): SPARE_LOADING,
    (RETURNED, ProcessEvent.NOT_AT_FUNCTION): RUNNING,
    **{(state, ProcessEvent.EXITS): EXITING for state in IN_ROUND | SPARES},
    **{(state, ProcessEvent.REAPED): ENDED for state in ProcessState if state is not ENDED},
}


def next_state(state: ProcessState, event: ProcessEvent) -> ProcessState:
    """Return the state after an event. ImpossibleEventError: the event makes no sense in this state."""
    after = _TRANSITIONS.get((state, event))
    if after is not None:
        return after
    if event in REPORTS and state is not ENDED:
        return state
    raise ImpossibleEventError(f"{event.value} in state {state.value}")

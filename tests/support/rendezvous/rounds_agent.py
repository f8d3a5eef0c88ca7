"""One simulated agent for `rounds_world`: the product's `machine.decide`, with a model of its workers and its links.

Everything is frozen data. The functions return the agent after a move; `Agent.outbox` has what it sent and the
coordinator has not read yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob._runtime.agent.monitoring.progress.worker_progress import HOLD_TIMEOUT
from elasticjob._runtime.agent.state_machine import decide as machine
from elasticjob._runtime.agent.state_machine import events
from elasticjob._runtime.agent.state_machine.effects import (
    BreakCollectivesOfWorkers,
    Effect,
    Exit,
    FreezeWorkers,
    HoldWorkers,
    LaunchWorkers,
    PrestartWorkers,
    Send,
    SetNodeEnd,
    StartLeaveTimer,
    StopWorkers,
    StopWorkersAt,
)
from elasticjob._runtime.agent.state_machine.events import AgentEvent
from elasticjob._runtime.agent.state_machine.state import AgentPhase, AgentState
from elasticjob._runtime.contract.messages import (
    AgentToCoordinator,
    Announce,
    CoordinatorToAgent,
    Failure,
    FailureClass,
    MemberState,
    NewProcesses,
    Outcome,
    StartRound,
    StoreToAgent,
    Termination,
    WorkersStopped,
)
from elasticjob._runtime.contract.names import RoundId
from support.rendezvous.rounds_options import USER_ERROR

INCARNATIONS = 100
"""Numbers of agents: the index, plus this for each earlier pod of the index."""
FORM_SECONDS = 0.1
"""What a node reports of the time that ranks need to form a group, in worlds where it knows what a start takes."""
FIRST_STEP = 5
"""The last step of every worker with an even index when it starts; the others are one step ahead."""


@dataclass(frozen=True)
class Agent:
    """An agent's process, its workers, and its link to a store."""

    index: int
    incarnation: int
    machine: AgentState
    created: float = 0.0
    workers: int = 1
    exited: int = 0
    """Workers of the round that have ended with success."""
    lost: int = 0
    """Workers of the round whose process has ended, though their function can be called again."""
    store: int | None = None
    """The incarnation of the store that it is connected to."""
    newest: int = 0
    """The highest incarnation of a store that it has connected to."""
    standby: int = -1
    """The incarnation of the standby store that it knows; -1 for none."""
    passive: bool = False
    """Whether the store that it is connected to was a passive standby store, and has not said that it is active."""
    cut_store: int = -1
    """The incarnation of a store that it cannot reach, though it may reach all others; -1 for none."""
    deaf: bool = False
    """Whether the store has closed the link, and the agent has not noticed."""
    old_link: int | None = None
    """A store that has not noticed that the agent closed its link."""
    old_outbox: tuple[AgentToCoordinator, ...] = ()
    """What the agent sent over that link and the store has not read."""
    outbox: tuple[AgentToCoordinator, ...] = ()
    inbox: tuple[CoordinatorToAgent | StoreToAgent, ...] = ()
    launching: bool = False
    starting_ahead: bool = False
    """Whether workers run their script up to its function, ahead of a round."""
    holding: bool = False
    """Whether the workers are about to be held at their next step."""
    held_until: float | None = None
    """When the hold ends."""
    step: int = 0
    """The last step that a worker may have completed."""
    stops_at: int | None = None
    """The last step, at which the workers stop by themselves."""
    killing: bool = False
    """Whether the workers are being stopped."""
    interrupted: bool = False
    """Whether the workers that stop are asked to leave their function."""
    waits: bool = False
    """Whether its workers count no step any more, and wait to break their collectives."""
    late: bool = False
    """Whether another node had broken its collectives before these workers stopped to count steps."""
    broke: RoundId | None = None
    """The last round whose collectives its workers have broken."""
    workers_frozen: bool = False
    timer: float | None = None
    """When the agent stops to wait for an answer to `Leaving`."""
    machine_end: float | None = None
    """When its machine ends, as its workers know it."""
    past: AgentToCoordinator | None = None
    """The last message about the round before the present one, for the move `late`."""
    missed_step: bool = False
    """Whether the workers have to stop at a step that they had passed: a planned end that loses a step."""
    cut: bool = False
    cut_at: float = 0.0
    group: int = 0
    """The nodes that were cut off together with this one, and that it reaches; 0 for none."""
    paused: bool = False
    deleting: bool = False
    """Whether its pod is being deleted."""
    ended: Outcome | None = None
    crashed: bool = False
    ended_at: float = 0.0
    termination: Termination | None = None

    @property
    def number(self) -> int:
        """The number by which moves name the agent; the index for the first pod of an index."""
        return self.index + INCARNATIONS * self.incarnation

    @property
    def agent_id(self) -> str:
        return f"{self.index}.{self.incarnation}"

    @property
    def pod(self) -> str:
        return pod_name(self.index, self.incarnation)

    @property
    def ready(self) -> bool:
        return self.machine.launcher_ready

    @property
    def leaving(self) -> bool:
        return bool(self.machine.leaving)

    @property
    def start(self) -> StartRound | None:
        """The last assignment that it received."""
        return self.machine.assignment

    @property
    def state(self) -> MemberState:
        return self.machine.member if self.ended is None else MemberState.STOPPED

    @property
    def frozen(self) -> bool:
        return self.machine.frozen or self.workers_frozen

    @property
    def stopping(self) -> bool:
        return self.killing

    @property
    def busy(self) -> bool:
        """Whether workers of a round may run."""
        return self.ended is None and self.machine.phase not in (AgentPhase.IDLE, AgentPhase.FINISHED)

    @property
    def training(self) -> bool:
        """Whether its workers run, and neither stop nor are frozen."""
        return self.busy and self.machine.phase is AgentPhase.RUNNING and not (self.killing or self.frozen)

    @property
    def last_failure(self) -> tuple[RoundId, Failure] | None:
        """The failure of its workers in their last round, other than a broken collective."""
        if self.start is None or self.machine.failure is None:
            return None
        own = self.machine.failure.kind is not FailureClass.COLLECTIVE_FAILED
        return (self.start.round, self.machine.failure) if own else None


def pod_name(index: int, incarnation: int) -> str:
    return f"bert-{index}-{incarnation}"


def new_agent(index: int, incarnation: int, now: float, workers: int = 1) -> Agent:
    """Return the agent of a pod that has just started."""
    name = pod_name(index, incarnation)
    announcement = Announce(index, incarnation, f"{index}.{incarnation}", name, f"10.0.0.{index}", 1, workers)
    return Agent(index, incarnation, AgentState(announcement, 1.0, 120.0), created=now, workers=workers)


def send(a: Agent, message: AgentToCoordinator) -> Agent:
    """Send a message; without a link that both sides hold, it is lost."""
    return a if a.store is None or a.deaf else replace(a, outbox=(*a.outbox, message))


def dispatch(a: Agent, event: AgentEvent, now: float) -> Agent:
    """Return the agent after one event: the product decides, and the effects are carried out or begin."""
    before = a.start
    decision = machine.decide(a.machine, event)
    a = replace(a, machine=decision.state)
    if before is not None and a.start is not None and before.round != a.start.round:
        a = replace(a, past=WorkersStopped(before.round, 1))
    for effect in decision.effects:
        a = _carry_out(a, effect, now)
    return a


def _carry_out(a: Agent, effect: Effect, now: float) -> Agent:
    match effect:
        case Send(message):
            return send(a, message)
        case LaunchWorkers():
            step = FIRST_STEP + a.index % 2
            return replace(a, launching=True, exited=0, lost=0, stops_at=None, held_until=None, step=step)
        case PrestartWorkers():
            return replace(a, starting_ahead=True)
        case HoldWorkers():
            return replace(a, holding=True)
        case StopWorkersAt(round_id, step):
            return _stop_at(a, round_id, step, now)
        case StopWorkers(for_good=for_good, at_once=at_once):
            ends = for_good or at_once or not a.machine.launched
            a = replace(a, lost=a.workers if ends else a.lost, killing=True, launching=False, holding=False)
            return replace(a, stops_at=None, interrupted=not ends, waits=a.waits and not ends)
        case BreakCollectivesOfWorkers():
            assert a.start is not None
            return replace(a, waits=False, interrupted=False, broke=a.start.round)
        case FreezeWorkers(on):
            return replace(a, workers_frozen=on)
        case StartLeaveTimer(seconds):
            return replace(a, timer=now + seconds)
        case SetNodeEnd(seconds):
            return replace(a, machine_end=None if seconds is None else now + seconds)
        case Exit(_, termination):
            a = replace(a, ended=termination.outcome, termination=termination, ended_at=now, timer=None)
            return replace(a, launching=False, starting_ahead=False, holding=False, killing=False, workers_frozen=False)
        case _:
            return a


def _stop_at(a: Agent, round_id: RoundId, step: int, now: float) -> Agent:
    if a.held_until is None or now >= a.held_until:
        return dispatch(a, events.LastStepMissed(round_id), now)
    return replace(a, stops_at=step, missed_step=a.missed_step or step < a.step)


def work(
    a: Agent,
    now: float,
    *,
    reports_steps: bool = True,
    start_seconds: float | None = None,
    broken: frozenset[RoundId] | None = None,
) -> Agent:
    """Let what is in progress on the node end: a stop, a start, a hold, or the last step.

    `reports_steps`: the script uses elasticjob's API, so that its function can be called again, too. `start_seconds`:
    what the start of a process takes there; None: nodes do not know it, and report no process that has ended.
    `broken`: the rounds whose collectives another node has broken; None: devices do not work behind the host, so no
    node waits with that.
    """
    if a.killing and a.interrupted and a.lost < a.workers and broken is not None:
        assert a.start is not None
        waits = replace(a, waits=True, late=a.start.round in broken)
        return dispatch(waits, events.AllResultsEnded(a.start.round), now)
    if a.killing:
        new = (
            NewProcesses()
            if start_seconds is None
            else NewProcesses(a.lost, start_seconds, FORM_SECONDS, keeps_newest_state=True)
        )
        parked = start_seconds is not None and a.lost < a.workers
        a = replace(a, killing=False, workers_frozen=False)
        return dispatch(a, events.AllWorkersStopped(1, parked=parked, new_processes=new), now)
    if a.starting_ahead:
        return dispatch(replace(a, starting_ahead=False), events.WorkersPrestarted(), now)
    assert a.start is not None
    round_id = a.start.round
    if a.launching:
        a = dispatch(replace(a, launching=False), events.WorkersLaunched(round_id), now)
        return dispatch(a, events.FunctionCalled(), now) if reports_steps else a
    if a.holding:
        return _hold(a, round_id if reports_steps else None, now)
    a = replace(a, stops_at=None)
    for local_rank in range(a.exited, a.workers):
        a = dispatch(a, events.WorkerEnded(round_id, local_rank, as_planned=True), now)
    return a


def _hold(a: Agent, reporting: RoundId | None, now: float) -> Agent:
    """Hold the workers at the report of the step that they have begun, which they complete.

    Workers that are held already stay where they are, but their agent may see their step only now.
    """
    a = replace(a, holding=False)
    if reporting is None:
        assert a.start is not None
        return dispatch(a, events.WorkersHeld(a.start.round, None), now)
    held = a.held_until is not None and now < a.held_until
    a = replace(a, step=a.step if held else a.step + 1, held_until=now + HOLD_TIMEOUT)
    return dispatch(a, events.WorkersHeld(reporting, a.step + held), now)


def works(a: Agent) -> bool:
    """Return whether something is in progress on the node that ends without a message."""
    return (
        (a.killing and not a.waits)
        or a.starting_ahead
        or ((a.launching or a.holding or a.stops_at is not None) and not a.workers_frozen)
    )


def fail(a: Agent, kind: FailureClass, now: float) -> Agent:
    """Let a worker fail."""
    assert a.start is not None
    exit_code = USER_ERROR if kind is FailureClass.USER_ERROR else None
    signal = "SIGKILL" if kind is FailureClass.KILLED else ""
    failure = Failure(kind, a.pod, now, rank=a.start.rank, exit_code=exit_code, signal=signal)
    lost = a.lost if kind is FailureClass.COLLECTIVE_FAILED else min(a.lost + 1, a.workers)
    return dispatch(replace(a, launching=False, lost=lost), events.WorkerEnded(a.start.round, 0, failure), now)


def may_fail(a: Agent) -> bool:
    """Return whether a worker may fail: not before it was started, and not while all are stopped or frozen."""
    phase = a.machine.phase
    started = phase is AgentPhase.RUNNING or (phase is AgentPhase.STARTING and a.machine.launched)
    return started and not (a.killing or a.frozen)


def crash(a: Agent, now: float) -> Agent:
    """Let the agent's container end by a signal, with all its workers."""
    a = replace(a, ended=Outcome.ERROR, crashed=True, ended_at=now, store=None, deaf=False, outbox=(), inbox=())
    return replace(
        a,
        launching=False,
        starting_ahead=False,
        holding=False,
        killing=False,
        waits=False,
        stops_at=None,
        workers_frozen=False,
        timer=None,
    )

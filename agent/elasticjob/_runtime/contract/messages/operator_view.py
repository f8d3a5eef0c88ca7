"""What the operator sends to the coordinator: one complete view of the job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticjob._runtime.contract.messages.round_settings import RoundSettings
from elasticjob._runtime.contract.messages.to_agents import Finish, StandbyStore
from elasticjob._runtime.contract.names import RoundId


class PodState(str, Enum):
    """State of a worker pod in Kubernetes, as far as rounds depend on it."""

    STARTING = "starting"
    """Scheduled, not running yet."""
    RUNNING = "running"
    DRAINING = "draining"
    """Being deleted or evicted: no round may include it."""
    UNSCHEDULABLE = "unschedulable"
    """Pending without a Node, or its image cannot be pulled. No round waits for it."""
    LOST = "lost"
    """Kubernetes reports it running, but its kubelet is silent: a recovering store waits for it only briefly."""


@dataclass(frozen=True)
class ExpectedPod:
    """The live pod of an index. An index that is not listed has no pod, and no round waits for it."""

    index: int
    incarnation: int
    """Older incarnations of the index are ignored, even if still running."""
    pod: str
    state: PodState = PodState.RUNNING
    """RUNNING also where this store does not know the state that the operator has sent."""
    topology: tuple[str, ...] = ()
    """Where its Node is, from the widest place to the narrowest, such as zone and rack; empty if that is unknown."""


@dataclass(frozen=True)
class EndingPod:
    """A pod whose Node is about to end at a known time."""

    pod: str
    time: float
    """When the Node ends, Unix seconds."""


@dataclass(frozen=True)
class OperatorView:
    """All that the operator knows; each view replaces the previous one.

    The coordinator drops a view whose (lease, sequence) is not newer: two operators may be connected at once.
    """

    lease: int
    """Generation of the operator's leader-election lease, or more than `Report.view_lease` where that is not newer."""
    sequence: int
    """Counter of the views of one lease holder."""
    settings: RoundSettings
    charged: int
    """Restarts counted against the budget, as persisted in the job's status."""
    charged_round: RoundId | None
    """Last ended round that the status accounts for; the coordinator drops its records up to this round."""
    pods: tuple[ExpectedPod, ...] = ()
    confirmed_request: float = 0.0
    """Copy of `Report.confirmation_request`: the operator confirms that this is the job's only store. 0: nothing is
    confirmed."""
    confirmed_half: bool = False
    """The confirmation holds only while no more than half of the last round's members are missing."""
    charged_rounds: tuple[RoundId, ...] = ()
    """Rounds after `charged_round` that `charged` includes already, because a pod failed as their member."""
    finish: Finish | None = None
    """How the job ended, by its status; None while it runs. A store that started after the end cannot know."""
    serving: int = -1
    """Incarnation of the store that status names. A standby store that it names becomes active."""
    standby_store: StandbyStore | None = None
    """The standby store, once it can take over; None: there is none that the agents may use."""
    retired: bool = False
    """To a passive standby store: it must never become active."""
    charged_since: float = 0.0
    """When the first failure of the window happened to which `charged` belongs, Unix seconds; 0 without a window."""
    newest_round: RoundId | None = None
    """The newest round that the operator knows of, if all its workers had started. A standby store takes over for this
    round or a newer one only, and no store takes an older one for the last round."""
    beside_store: tuple[str, ...] = ()
    """Names of the worker pods on the Node of the store that status names: they are lost together with that Node."""
    sent_at: float = 0.0
    """When the operator sends this view, Unix seconds of the clock by which it knows `ending_pods`."""
    finished_stages: int = 0
    """As in `StartRound`, by the job's status: what is known if the store and all agents are lost."""
    launchers: tuple[str, ...] = ()
    """As in `StartRound`."""
    ending_pods: tuple[EndingPod, ...] | None = None
    """Worker pods on Nodes that are about to end at a known time. None while the operator cannot see Nodes: the ends
    that it sent before still hold."""

"""Messages between an agent and a worker whose function it can call again in the same process.

The worker connects to the Unix socket (SOCK_SEQPACKET) that `Env.RESTART_SOCKET` names. Each packet is one message: a
JSON object with its `type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.names import RoundId

MAX_MESSAGE = 1 << 17
"""Bytes of one message: an environment is the largest."""
MAX_TEXT = 4096
"""Characters of an exception's text."""


@dataclass(frozen=True)
class Calling:
    """Worker: the function runs. Until it returns, this process stays for the next round: interrupt it instead."""

    round: RoundId
    spare_process: bool = False
    """A second process of this rank is to wait at the function, and to call it if this one ends."""


@dataclass(frozen=True)
class Guarded:
    """Worker: its process groups have a time-out that torch does not act on, because the process is to stay.

    Sent in each round once such a group exists, and again when a field changes.
    """

    round: RoundId
    seconds: float
    """The shortest time-out of these groups."""
    by_collectives: bool = True
    """The worker sends `CollectiveFailed` when torch finds one of them overdue or failed. False: this version of torch
    does not tell, so only the steps of the script show whether it makes progress."""


@dataclass(frozen=True)
class CollectiveFailed:
    """Worker: torch has found a collective that failed or is overdue, and would have ended the process."""

    round: RoundId
    message: str
    overdue: bool
    """It has exceeded the time-out of its group. False: its communicator has failed."""


@dataclass(frozen=True)
class ResultsEnded:
    """Worker: it counts no more steps of the round, and sends `Interrupted` and `Parked` after `BreakCollectives`.

    Sent only if devices work asynchronously to the host: an abort may then end a collective of another rank as if it
    had succeeded, with part of the result.
    """

    round: RoundId


@dataclass(frozen=True)
class Interrupted:
    """Worker: the function was interrupted, or has stopped at the last step. It runs no more, and its process groups
    are about to end. `Parked` follows."""

    round: RoundId


@dataclass(frozen=True)
class Raised:
    """Worker: the function failed with an exception; `Parked` follows."""

    round: RoundId
    exception: str
    """Name of its type."""
    message: str


@dataclass(frozen=True)
class Parked:
    """Worker: the function has ended, and so have its process groups. Nothing of the round runs in this process."""

    round: RoundId
    at_last_step: bool = False
    """The function stopped at the last step of a planned end."""


@dataclass(frozen=True)
class Kept:
    """Worker: after `End`, the state of this process is in the memory of its pod. What follows is the script's."""


@dataclass(frozen=True)
class Interrupt:
    """Agent: the round has ended. Leave the function."""

    round: RoundId


@dataclass(frozen=True)
class BreakCollectives:
    """Agent: no rank of the round counts steps any more. Answers `ResultsEnded`."""

    round: RoundId


@dataclass(frozen=True)
class CallAgain:
    """Agent: call the function in this round."""

    round: RoundId
    variables: tuple[str, ...]
    """`NAME=value`: the variables of a worker of this round."""


@dataclass(frozen=True)
class End:
    """Agent: there is no next round for this process. It copies its state to the memory of its pod, and ends."""

    at_once: bool = False
    """No more of the script runs: the job goes on without this pod, and another one may write the same files."""


WorkerToAgent: TypeAlias = Calling | Guarded | CollectiveFailed | ResultsEnded | Interrupted | Raised | Parked | Kept
AgentToWorker: TypeAlias = Interrupt | BreakCollectives | CallAgain | End

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls for union in (WorkerToAgent, AgentToWorker) for cls in get_args(union)
}


def to_packet(message: WorkerToAgent | AgentToWorker) -> bytes:
    """Return a message as one packet."""
    return codec.dump_tagged(message)


def from_packet(packet: bytes) -> Any:
    """Return the message that `to_packet` wrote. MessageError: the packet is something else."""
    return codec.parse_tagged(_TYPES, packet)


def variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return an environment as the variables of `CallAgain`."""
    return tuple(f"{name}={value}" for name, value in env.items())

"""The wire form of the messages on control links: JSON objects whose `type` is the name of the class.

The classes of `Message` are the registry: a message is known if its class is one of them. A new class also
gets an entry in `NEW_MESSAGES`, a new value of an enum one in `NEW_VALUES` if 0.1.0 knows the field or if an older
version must not ignore the value. Both raise `PROTOCOL`.

Names that are on the wire do not change: names of classes in `Message`, of fields, and values of enums. Some of them
say "node" for a worker pod and its agent, and "machine" for a Kubernetes Node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, get_args

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages.between_members import CutOffNotice, MemberLink
from elasticjob._runtime.contract.messages.from_agents import (
    AgentToCoordinator,
    NodeResultsEnded,
    StageBegan,
    StageEnded,
    StateReceived,
    TrainingProgress,
)
from elasticjob._runtime.contract.messages.operator_view import OperatorView
from elasticjob._runtime.contract.messages.report import EndReason, Report
from elasticjob._runtime.contract.messages.to_agents import (
    BreakRound,
    CoordinatorToAgent,
    MachineEnd,
    StageFinished,
    StoreToAgent,
)

PROTOCOL = 5
"""Version of the messages. The two sides of a control link use the lower of their versions. An entry in
`NEW_MESSAGES` or `NEW_VALUES` raises it; a new field with a default does not."""


OLDEST_PROTOCOL = 2
"""The lowest version that this one works with. It is the version of elasticjob 0.1.0, which closes a link when it gets
a type of message, or a value, that it does not know."""


Message: TypeAlias = (
    AgentToCoordinator | CoordinatorToAgent | StoreToAgent | MemberLink | CutOffNotice | OperatorView | Report
)


_TYPES: Mapping[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


NEW_MESSAGES: Mapping[type[Message], int] = {
    TrainingProgress: 3,
    MachineEnd: 3,
    StateReceived: 3,
    NodeResultsEnded: 4,
    BreakRound: 4,
    StageBegan: 5,
    StageEnded: 5,
    StageFinished: 5,
}
"""The first version that knows a type of message, for those that came after `OLDEST_PROTOCOL`."""


@dataclass(frozen=True)
class NewValue:
    """A member of an enum that came after `OLDEST_PROTOCOL`."""

    member: Enum
    since: int
    """The first version that knows it."""
    instead: Enum
    """What peers of earlier versions get."""


NEW_VALUES: tuple[NewValue, ...] = (NewValue(EndReason.CODE_UPDATED, 5, EndReason.SCALING_UP),)


def is_known(message: Message, protocol: int) -> bool:
    """Return whether version `protocol` knows messages of this type."""
    return NEW_MESSAGES.get(type(message), OLDEST_PROTOCOL) <= protocol


def encode(message: Message, protocol: int = PROTOCOL) -> bytes:
    """Return a message as a JSON object, its `type` first, with values that version `protocol` knows."""
    newer = [value for value in NEW_VALUES if value.since > protocol]
    return codec.dump_tagged(_with_older_values(message, newer) if newer else message)


def _with_older_values(value: Any, newer: Sequence[NewValue]) -> Any:
    """Return the value with the members of `newer` replaced."""
    if isinstance(value, Enum):
        # Members of different enums may be equal.
        return next((new.instead for new in newer if new.member is value), value)
    if type(value) is tuple:
        return tuple(_with_older_values(item, newer) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _with_older_values(getattr(value, f.name), newer) for f in fields(value)})


def decode(data: bytes) -> Message:
    """Return the message that `encode` wrote. MessageError: `data` is something else."""
    return codec.parse_tagged(_TYPES, data)

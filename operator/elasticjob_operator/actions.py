"""Everything that the operator does to a cluster: a closed union of frozen values. Names are functions of state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class CreateSecret:
    """The job's keys."""


@dataclass(frozen=True)
class CreateNodesService:
    """The headless Service that gives workers their host names."""


@dataclass(frozen=True)
class CreateStoreService:
    """The Service of the store; it selects one incarnation."""

    incarnation: int


@dataclass(frozen=True)
class UpdateStoreService:
    """Make the store's Service select another incarnation."""

    uid: str
    incarnation: int


@dataclass(frozen=True)
class DeleteService:
    name: str
    uid: str


@dataclass(frozen=True)
class CreateStore:
    name: str
    incarnation: int
    avoid: tuple[str, ...] = ()
    """Nodes that it must not be placed on."""


@dataclass(frozen=True)
class CreateWorker:
    name: str
    index: int
    incarnation: int
    avoid: tuple[str, ...] = ()
    """Nodes that it must not be placed on."""


@dataclass(frozen=True)
class DeletePod:
    """`force` takes the object away without the kubelet's word: only for a node that is gone."""

    name: str
    uid: str
    why: str
    force: bool = False


Action: TypeAlias = (
    CreateSecret
    | CreateNodesService
    | CreateStoreService
    | UpdateStoreService
    | DeleteService
    | CreateStore
    | CreateWorker
    | DeletePod
)


@dataclass(frozen=True)
class EventRecord:
    """An Event. Its name is made from `reason` and `key`: the same happening told twice is one Event."""

    reason: str
    message: str
    key: str
    warning: bool = False
    repeats: bool = False
    """Whether telling it again raises its count."""

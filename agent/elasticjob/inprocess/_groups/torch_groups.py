"""What torch knows of the process groups of this process: its tables, and the backends of each group."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "pg_flight_recorder_hooks",
)
"""What `destroy_process_group` clears, by torch's names. Older versions lack the last one."""


def known_groups() -> list[tuple[Any, tuple[Any, Any]]]:
    """Return the process groups that torch knows at this moment, each with (backend, store)."""
    while True:
        with suppress(RuntimeError):  # another thread has created a group meanwhile
            return list(distributed_c10d._world.pg_map.items())


def backends_of(group: Any) -> list[Any]:
    """Return the backends of a group, each once; a group that is written in Python is its own. None: it was aborted."""
    found: list[Any] = []
    with suppress(RuntimeError):
        for device in sorted(group._device_types, key=lambda device: str(device.type)):
            backend = group._get_backend(device)
            for each in (backend, getattr(backend, "wrapped_pg", None)):  # the latter with TORCH_DISTRIBUTED_DEBUG
                if each is not None and all(each is not other for other in found):
                    found.append(each)
        return found or [group]
    return []


def is_gloo(backend: Any) -> bool:
    with suppress(RuntimeError, AttributeError):
        return bool(backend.name() == "gloo")
    return False


def has_gloo(group: Any) -> bool:
    return any(map(is_gloo, backends_of(group)))


def published_by(group: Any, entry: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return the arguments of `published_addresses` for a group."""
    return entry[1], {device.type for device in group._device_types}, group.rank(), group.size()


def forget_groups() -> None:
    """Clear torch's table, if it still has groups: the creation of one was interrupted, or its end has failed.

    The groups of the next round have the same names, which torch would refuse.
    """
    if not known_groups() and not distributed_c10d._world.pg_names:
        return
    distributed_c10d._update_default_pg(None)
    for name in _TABLES:
        if (table := getattr(distributed_c10d._world, name, None)) is not None:
            table.clear()
    distributed_c10d._unregister_all_process_groups()

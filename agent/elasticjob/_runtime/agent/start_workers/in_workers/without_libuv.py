"""Make torch create its stores without libuv, where USE_LIBUV is 0: the agent sets that for a torch that lacks it.

Where the agent hosts the store, and in torchrun's own rendezvous, such a torch requests libuv without reading
USE_LIBUV, and fails. This therefore replaces TCPStore in the modules that create stores.
"""

from __future__ import annotations

import functools
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def create_without_libuv(module: ModuleType) -> None:
    """Replace TCPStore in a module of torch."""
    store = getattr(module, "TCPStore", None)
    if store is not None and os.environ.get("USE_LIBUV") == "0":
        module.TCPStore = functools.partial(store, use_libuv=False)  # type: ignore[attr-defined]

"""On PYTHONPATH of workers whose torch was built without libuv.

Where the agent hosts the store, such a torch asks for libuv all the same (USE_LIBUV is not read on that way) and fails.
So its store is told otherwise, once it has been imported. Python loads a module of this name at its start; the one
that this hides is loaded too.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "torch.distributed.rendezvous"


def tell(rendezvous: ModuleType) -> None:
    """Let torch's environment rendezvous make its stores without libuv."""
    store = getattr(rendezvous, "TCPStore", None)
    if store is not None:
        rendezvous.TCPStore = functools.partial(store, use_libuv=False)  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds the one module as everyone else would, and lets it be told."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        tell(module)


def _load_hidden() -> None:
    here = os.path.dirname(__file__)  # noqa: PTH120  # may be inside a zip archive
    sys.path[:] = [entry for entry in sys.path if entry != here]
    hiding = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError:
        sys.modules[__name__] = hiding


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    _load_hidden()

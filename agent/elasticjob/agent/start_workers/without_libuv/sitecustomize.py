"""Make torch create its stores without libuv. This module is on PYTHONPATH of workers whose torch lacks libuv.

Where the agent hosts the store, and in torchrun's own rendezvous, such a torch requests libuv without reading
USE_LIBUV, and fails. This module therefore replaces TCPStore in the modules that create stores.
Python imports a module named sitecustomize at its start. This one also imports the sitecustomize that it hides.
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

MODULES = ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")


def install() -> None:
    """Replace TCPStore in the modules that are imported already, and in the others when they are imported."""
    sys.meta_path.insert(0, _Finder())
    for name in MODULES:
        if (module := sys.modules.get(name)) is not None:
            _replace_store(module)


def _replace_store(module: ModuleType) -> None:
    store = getattr(module, "TCPStore", None)
    if store is not None:
        module.TCPStore = functools.partial(store, use_libuv=False)  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds the modules by the other finders, and wraps their loaders."""

    def __init__(self) -> None:
        self._finding = ""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in MODULES or name == self._finding:
            return None
        self._finding = name
        spec = importlib.util.find_spec(name)
        self._finding = ""
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
        _replace_store(module)


def _import_hidden() -> None:
    here = os.path.dirname(__file__)  # noqa: PTH120  # may be inside a zip archive
    sys.path[:] = [entry for entry in sys.path if entry != here]
    this_module = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError:
        sys.modules[__name__] = this_module


if __name__ == "sitecustomize":
    install()
    _import_hidden()

"""Errors in what the event loop of one process calls, put in from the environment through `sitecustomize`.

Every callback of elasticjob that is registered with an event loop is found, by wrapping what registers callbacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

INJECT = """
import asyncio, functools, os, sys

ROLE, TARGET, FOLDER = (os.environ.get(f"INJECT_{name}", "") for name in ("ROLE", "TARGET", "FOLDER"))
POD = os.environ.get("ELASTICJOB_POD_NAME", "")


def name_of(callback):
    while isinstance(callback, functools.partial):
        callback = callback.func
    function = getattr(callback, "__func__", callback)
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{function.__qualname__}" if module.startswith("elasticjob.") else ""


def once(name):
    try:
        os.close(os.open(os.path.join(FOLDER, "injected"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise RuntimeError(f"injected into {name}")


def wrap(callback):
    name = name_of(callback)
    if not name:
        return callback

    @functools.wraps(callback)
    def call(*args):
        with open(os.path.join(FOLDER, "called"), "a") as file:
            file.write(name + "\\n")
        if name == TARGET:
            once(name)
        return callback(*args)

    return call


def replace(owner, method, at):
    original = getattr(owner, method)

    @functools.wraps(original)
    def register(self, *args, **options):
        args = list(args)
        args[at] = wrap(args[at])
        return original(self, *args, **options)

    setattr(owner, method, register)


def inject_effects():
    from elasticjob._runtime.agent import runner
    carry_out = runner.Agent.execute

    def execute(self, effect):
        with open(os.path.join(FOLDER, "called"), "a") as file:
            file.write(type(effect).__name__ + "\\n")
        if type(effect).__name__ == TARGET:
            once(TARGET)
        return carry_out(self, effect)

    runner.Agent.execute = execute


if ROLE and ROLE in sys.orig_argv[2:4] and (ROLE != "agent" or POD.endswith("-1-0")):
    for method, at in (("call_soon", 0), ("call_at", 1), ("call_soon_threadsafe", 0)):
        replace(asyncio.BaseEventLoop, method, at)
    for method in ("add_reader", "add_signal_handler"):
        replace(asyncio.SelectorEventLoop, method, 1)
    if ROLE == "agent":
        run = asyncio.run
        asyncio.run = lambda main: (inject_effects(), run(main))[1]
"""


def injecting(role: str, target: str, folder: Path) -> Mapping[str, str]:
    """Return the environment in which the first call of `target` raises, in a store or in the first agent of node 1.

    `role`: `agent` or `store`. `target`: a module and a qualified name of a callback, or the name of an effect of the
    agent. What is called is written to a file in `folder`, see `called`.
    """
    (folder / "inject").mkdir()
    (folder / "inject" / "sitecustomize.py").write_text(INJECT)
    variables = {"INJECT_ROLE": role, "INJECT_TARGET": target, "INJECT_FOLDER": str(folder)}
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(folder / "inject"), *_python_path()])}


def called(folder: Path) -> set[str]:
    """Return the names of all callbacks and effects that the process has called."""
    return set((folder / "called").read_text().split("\n")) - {""}


def _python_path() -> Iterable[str]:
    return filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

"""Whether a script uses elasticjob itself: then nothing is added to its trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

from elasticjob.training import progress_channel

_NOT_THE_SCRIPT = {"elasticjob", "_elasticjob_in_workers", "sitecustomize", *sys.stdlib_module_names} | {
    "accelerate", "lightning", "numpy", "pytorch_lightning", "torch", "transformers", "__mp_main__",
}  # fmt: skip
"""Packages that do not import elasticjob. In those of Python are hooks of elasticjob, such as `sys.excepthook`.
`__mp_main__` is the fork server's program in a fork."""

registered_saves: list[Callable[[], object]] = []


def save_on_stop(save: Callable[[], object]) -> None:
    """Call `save` as `elasticjob.on_stop` does; it does not count as one of the script's."""
    registered_saves.append(save)
    progress_channel.on_stop(save)


def uses_elasticjob() -> bool:
    """Return whether the script has imported elasticjob or something of it into a module, or registered a callback."""
    if len(progress_channel.channel.callbacks) > len(registered_saves):
        return True
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_THE_SCRIPT]
    modules.append(sys.modules["__main__"])
    return any(
        _is_of_elasticjob(value)
        for module in modules
        if type(module) is ModuleType
        for value in list(vars(module).values())
    )


def _is_of_elasticjob(value: object) -> bool:
    kind = type(value)  # not `isinstance`: a lazy object would import what it stands for
    if kind is ModuleType:
        name = vars(value).get("__name__")
    elif kind is FunctionType or issubclass(kind, type):
        name = getattr(value, "__module__", None)
    else:
        name = getattr(kind, "__module__", None)
    return isinstance(name, str) and (name == "elasticjob" or name.startswith("elasticjob."))

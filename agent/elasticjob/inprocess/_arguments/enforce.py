"""Checks of arguments, with errors that name the argument, its value and what to write instead."""

from __future__ import annotations

import pickle
from typing import Any


def enforce_type(name: str, value: object, *types: type | None) -> None:
    """Raise TypeError unless `value` is an instance of one of the types; None stands for the value None."""
    kinds = tuple(type(None) if kind is None else kind for kind in types)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is None else kind.__name__ for kind in types)
        raise TypeError(f"{name} must be {names}, not {value!r} ({type(value).__name__})")


def enforce_instance_of_hook(name: str, value: object, base: type, *, optional: bool = True) -> None:
    """Raise TypeError unless `value` is an instance of the hook's base class, or None where that is allowed."""
    if isinstance(value, base) or (optional and value is None):
        return
    hint = f": write {name}={value.__name__}()" if isinstance(value, type) and issubclass(value, base) else ""
    none = " or None" if optional else ""
    raise TypeError(f"{name} must be an instance of {base.__name__}{none}, not {value!r}{hint}")


def enforce_subclass(name: str, value: object, base: type) -> None:
    """Raise TypeError unless `value` is a subclass of `base`."""
    if not (isinstance(value, type) and issubclass(value, base)):
        raise TypeError(f"{name} must be a class derived from {base.__name__}, not {value!r}")


def enforce_value(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def enforce_importable(name: str, value: Any, *, reason: str) -> bytes:
    """Return `value` pickled. TypeError: another process could not load it."""
    try:
        if getattr(value[0], "__module__", "") == "__main__":
            raise pickle.PicklingError("it is defined in __main__")
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{name}: define {value!r} in a module that can be imported, {reason}: {error}") from error

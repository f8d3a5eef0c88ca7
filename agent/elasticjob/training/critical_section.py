"""Stretches of code in the main thread that an interruption of the training function would leave half done.

`elasticjob.State` enters a section when an optimizer changes the model and leaves it when `step` is assigned. The
thread that interrupts the main thread queries `inside`, and delays the interruption for a short time. It must limit
that time: a script may wait for another rank inside a section, and an exception may end the stretch without a `leave`.

Only the main thread enters and leaves, and sections may be nested. An entry costs one addition of a plain integer.
"""

from __future__ import annotations

_depth = 0


def enter() -> None:
    """Begin a section."""
    global _depth
    _depth += 1


def leave() -> None:
    """End the innermost section; without a section nothing happens."""
    global _depth
    if _depth:
        _depth -= 1


def inside() -> bool:
    """Return whether the main thread is in a section. Any thread may call this."""
    return _depth > 0


def reset() -> None:
    """End all sections: the main thread has been interrupted, and their code does not continue."""
    global _depth
    _depth = 0

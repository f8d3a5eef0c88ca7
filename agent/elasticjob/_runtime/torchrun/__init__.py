"""This project's rendezvous under a stock torchrun: `torchrun --rdzv-backend=elasticjob --rdzv-endpoint=HOST:PORT ...`.

`handler` implements torch's `RendezvousHandler` over the control link. `create` builds it from torchrun's options.
Both modules import torch; this package does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKEND = "elasticjob"
"""The value of `--rdzv-backend` that selects this rendezvous."""


def get_creator() -> Callable[[Any], Any]:
    """Return the function that creates the handler: the entry point `torchrun.handlers`.

    torch calls it on every import of its rendezvous package, in every worker too, so it imports nothing.
    """
    return _create_handler


def _create_handler(params: Any) -> Any:
    from elasticjob._runtime.torchrun.create import create_handler

    return create_handler(params)

"""This project's rendezvous under a stock torchrun: `torchrun --rdzv-backend=elasticjob --rdzv-endpoint=HOST:PORT ...`.

`handler` is torch's `RendezvousHandler` over the control link, and `create` makes it from torchrun's options. They
import torch; importing this package does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKEND = "elasticjob"
"""The name that torchrun knows this rendezvous by."""


def get_creator() -> Callable[[Any], Any]:
    """Entry point `torchrun.handlers`: torch calls it whenever it imports its rendezvous, also in every worker."""
    return _create_handler


def _create_handler(params: Any) -> Any:
    from elasticjob.torchrun.create import create_handler

    return create_handler(params)

"""The accelerator of this process. Nothing here imports torch: a script without torch may report its progress too."""

from __future__ import annotations

import sys
from typing import Any


def synchronize_device() -> None:
    """Wait until the current accelerator has done all queued work; return at once if this process uses none.

    It never initialises a device: that takes seconds and device memory.
    """
    module = _module_in_use(sys.modules.get("torch"))
    if module is not None:
        module.synchronize()


def _module_in_use(torch: Any) -> Any:
    """Return `torch.cuda` or its like for another accelerator if this process has initialised it, else None."""
    if torch is None:
        return None
    accelerator = getattr(torch, "accelerator", None)  # from torch 2.6 on
    try:
        device = accelerator.current_accelerator() if accelerator is not None else None
    except RuntimeError:  # torch 2.6 raises where there is none, newer versions return None
        device = None
    module = getattr(torch, device.type if device is not None else "cuda", None)
    initialized = getattr(module, "is_initialized", None)
    return module if initialized is not None and initialized() else None

"""The accelerator of this process. Nothing here imports torch: a script without torch may report its progress too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any


def synchronize_device() -> None:
    """Wait until the devices of this process have done all queued work; return at once if it uses none.

    It never initialises a device: that takes seconds and device memory. A script that does not call `set_device` works
    on a GPU that is not the current one.
    """
    torch = sys.modules.get("torch")
    module = _module_in_use(torch)
    if module is None:
        return
    is_cuda = module is getattr(torch, "cuda", None)
    in_use = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None) if is_cuda else None
    if in_use is None:
        module.synchronize()
    else:
        for device in filter(in_use, range(module.device_count())):
            module.synchronize(device)


def own_streams(devices: Iterable[Any]) -> Callable[[], None]:
    """Return what a new thread calls so that its work on these CUDA devices does not queue behind that of the others.

    There is one such stream for each device. The thread does not go back to the first device, where it could not work
    without memory of its own.
    """
    found = [device for device in devices if device.type == "cuda"]
    for device in found:
        if device not in _streams:
            _streams[device] = sys.modules["torch"].cuda.Stream(device)

    def use_streams() -> None:
        for device in found:
            sys.modules["torch"].cuda.set_stream(_streams[device])

    return use_streams


_streams: dict[Any, Any] = {}


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

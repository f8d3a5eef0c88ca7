"""The accelerator of this process. Nothing here imports torch: a script without torch may report its progress too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Event(Protocol):
    """A place in the queue of a device."""

    def query(self) -> bool:
        """Return whether the device has done all work before it."""


def is_asynchronous() -> bool:
    """Return whether this process uses a device on which work goes on after its call has returned."""
    return module_in_use(sys.modules.get("torch")) is not None


def synchronize_device() -> None:
    """Wait until the devices of this process have done all queued work; return at once if it uses none.

    It never initialises a device: that takes seconds and device memory. A script that does not call `set_device` works
    on a GPU that is not the current one.
    """
    torch = sys.modules.get("torch")
    module = module_in_use(torch)
    if module is None:
        return
    devices = _cuda_devices(torch, module)
    if devices is None:
        module.synchronize()
    else:
        for device in devices:
            module.synchronize(device)


def wait_for_queued_work() -> None:
    """Wait until the devices have done what is queued on their current streams; return at once if there is none.

    Work of other streams goes on, such as copies of the next batch.
    """
    torch = sys.modules.get("torch")
    module = module_in_use(torch)
    if module is None:
        return
    if not hasattr(module, "current_stream"):
        module.synchronize()
        return
    for stream in _current_streams(torch, module):
        stream.synchronize()


def record_event() -> Event | None:
    """Record an event on the current stream of each device; None if the process uses none, or has no events."""
    torch = sys.modules.get("torch")
    module = module_in_use(torch)
    if module is None:
        return None
    if not hasattr(module, "current_stream") or not hasattr(module, "Event"):
        module.synchronize()
        return None
    events = []
    for stream in _current_streams(torch, module):
        event = module.Event()
        event.record(stream)
        events.append(event)
    return events[0] if len(events) == 1 else _Events(events)


class _Events:
    """One event on each of several devices."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)


def _current_streams(torch: Any, module: Any) -> list[Any]:
    devices = _cuda_devices(torch, module)
    return [module.current_stream()] if devices is None else [module.current_stream(device) for device in devices]


def _cuda_devices(torch: Any, module: Any) -> list[int] | None:
    """Return the GPUs on which this process has a context; None where torch does not tell: the current device."""
    is_cuda = module is getattr(torch, "cuda", None)
    in_use = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None) if is_cuda else None
    return None if in_use is None else list(filter(in_use, range(module.device_count())))


def own_streams(devices: Iterable[Any]) -> Callable[[], None]:
    """Return what a new thread calls so that its work on these CUDA devices does not queue behind that of the others.

    There is one such stream for each device. The thread does not go back to the first device, where it could not work
    without memory of its own.
    """
    found = [device for device in devices if device.type == "cuda"]
    for device in found:
        if device not in streams_by_device:
            streams_by_device[device] = sys.modules["torch"].cuda.Stream(device)

    def use_streams() -> None:
        for device in found:
            sys.modules["torch"].cuda.set_stream(streams_by_device[device])

    return use_streams


streams_by_device: dict[Any, Any] = {}


def module_in_use(torch: Any) -> Any:
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

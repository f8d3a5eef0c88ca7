"""The GPU of a rank: in the collectives of a process group, and that of its random numbers."""

from __future__ import annotations

import os
from typing import Any

import torch


def broadcast_device(group_device: Any, part_devices: list[Any]) -> Any:
    """Return the device with which this rank takes part in collectives of a process group for GPUs.

    `group_device`: the one that the script passed as `device_id` to `init_process_group`, or None. Next come the device
    of the State's own tensors, then `own_gpu`: ranks of one pod cannot share a device.
    """
    if group_device is not None and group_device.type == "cuda":
        return group_device
    for device in part_devices:
        if device.type == "cuda":
            return device
    return torch.device("cuda", own_gpu())


def own_gpu() -> int:
    """Return the number of the current GPU if the script has set one, else that of the GPU numbered LOCAL_RANK.

    Without `set_device` every rank's current device is 0.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return int(torch.cuda.current_device()) or local_rank % torch.cuda.device_count()

"""Lightning and Fabric take the number of nodes from the round, whatever the script or its configuration says.

`Trainer(num_nodes=4)` is right for one size of an elastic job: after a change of the size, Lightning would raise a
ValueError in each round. The number of workers on a node does not change, so another number of devices is an error.
"""

from __future__ import annotations

import functools
import os

from .assigned import TRAINS, assigned
from .one_world import ALLOWED, fail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def follow_round(module: ModuleType) -> None:
    """Replace what a connector of Lightning or Fabric does with `num_nodes` and `devices="auto"`."""
    for name in ("_AcceleratorConnector", "_Connector"):
        connector = getattr(module, name, None)
        check = getattr(connector, "_check_device_config_and_set_final_flags", None)
        if check is not None:
            connector._check_device_config_and_set_final_flags = _with_numbers_of_round(check)  # type: ignore[union-attr]


def _with_numbers_of_round(check: Any) -> Any:
    @functools.wraps(check)
    def with_numbers_of_round(self: Any, devices: Any, num_nodes: Any, *args: Any, **named: Any) -> None:
        # A Trainer of one device and one node after the training is meant so, such as the one that tests the model.
        if _in_round() and (num_nodes != 1 or TRAINS not in os.environ):
            local = int(assigned()["LOCAL_WORLD_SIZE"])
            devices = local if devices == "auto" else devices
            num_nodes = int(assigned()["WORLD_SIZE"]) // local
        check(self, devices, num_nodes, *args, **named)

    return with_numbers_of_round


def fail_at_once(module: ModuleType) -> None:
    """Let another number of devices than that of workers end the job: no restart can change that."""
    environment = getattr(module, "TorchElasticEnvironment", None)
    if environment is None:
        return
    validate = getattr(environment, "validate_settings", None)
    if validate is None:  # Lightning before 2.1
        return

    @functools.wraps(validate)
    def validate_settings(self: Any, num_devices: int, num_nodes: int) -> None:
        if _in_round() and num_devices * num_nodes != self.world_size():
            local = assigned()["LOCAL_WORLD_SIZE"]
            fail(
                f"Lightning has devices={num_devices}, and the job has {local} workers in each pod: set"
                f" spec.nprocPerNode: {num_devices}, or devices={local} in the script"
            )
        validate(self, num_devices, num_nodes)

    environment.validate_settings = validate_settings


def _in_round() -> bool:
    """Return whether this process is a rank of the round: what a rank starts may train apart."""
    given, environ = assigned(), os.environ
    own = all(environ.get(name) == given.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return bool(given) and own and environ.get(ALLOWED) != "1" and environ.get(TRAINS) in (None, str(os.getpid()))

"""`elasticjob.scale_learning_rate`: for training whose global batch changes with the world size. Imports torch."""

from __future__ import annotations

import math
from typing import Any, Literal

from elasticjob.data.ranks import Ranks


def scale_learning_rate(
    optimizer: Any,
    *,
    base_world_size: int,
    rule: Literal["linear", "sqrt"] = "linear",
    data_parallel: Any = None,
) -> None:
    """Multiply the learning rate of each parameter group by (world size / `base_world_size`), or by its square root.

    The factor applies within `optimizer.step()` only. Before and after it, `lr` is what you or a scheduler have set:
    any scheduler works, and saved states hold no scaled value. The world size is that of the round of each step.
    ValueError for another rule or a size below 1. Call it once for an optimizer. `data_parallel`: as for
    `ElasticSampler`; the world size is then the number of model replicas.
    """
    if rule not in ("linear", "sqrt") or base_world_size < 1:
        raise ValueError(f"rule is {rule!r} and base_world_size is {base_world_size}: want linear or sqrt, 1 or more")
    ranks = Ranks(data_parallel=data_parallel)
    unscaled: list[tuple[dict[str, Any], Any]] = []

    def scale(*_: object) -> None:
        restore()  # after a step that raised an exception
        ratio = ranks.current()[1] / base_world_size
        factor = ratio if rule == "linear" else math.sqrt(ratio)
        for group in optimizer.param_groups:
            unscaled.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def restore(*_: object) -> None:
        for group, rate in unscaled:
            group["lr"] = rate
        unscaled.clear()

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)

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
    Call it once for an optimizer.

    Args:
        optimizer: Any torch optimizer.
        base_world_size: The world size for which its learning rate was chosen.
        rule: "linear" multiplies by the ratio of the world sizes, "sqrt" by the square root of it.
        data_parallel: As for `ElasticSampler`. The world size is then the number of model replicas.

    Raises:
        ValueError: The rule is another one, or `base_world_size` is below 1.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> elasticjob.scale_learning_rate(optimizer, base_world_size=8)
        >>> optimizer.step()  # on one rank with a learning rate of 0.0125
        >>> optimizer.param_groups[0]["lr"]
        0.1
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

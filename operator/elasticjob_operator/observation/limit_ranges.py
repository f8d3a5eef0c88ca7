"""Fit a store pod to the LimitRanges of its namespace, which are read only once the API server has refused it."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from elasticjob_operator.kube import LIMIT_RANGES, KubeApi, KubeError
from elasticjob_operator.model.cluster.limit_ranges import fit_resources
from elasticjob_operator.model.cluster.raw import Raw


async def fitted_to_limit_ranges(api: KubeApi, pod: dict[str, Any], own: Raw) -> dict[str, Any]:
    """Return the store pod with requests and limits that the LimitRanges admit; it unchanged if there are none.

    `own` are the resources that the job itself sets, and that stay.
    """
    ranges: list[dict[str, Any]] = []
    with suppress(KubeError):  # the role of an older chart: the API server's refusal says what to write
        ranges = await api.list(LIMIT_RANGES, pod["metadata"]["namespace"])
    fitted = copy.deepcopy(pod)
    (container,) = fitted["spec"]["containers"]
    if ranges:
        container["resources"] = fit_resources(container["resources"], own, ranges)
    return fitted

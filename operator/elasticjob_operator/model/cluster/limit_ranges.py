"""LimitRanges of a namespace: which requests and limits of a container they admit. Pure.

The API server refuses a pod that breaks one. A trainer has the resources that its user chose; those of the store are
the operator's own, so the operator fits them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob._runtime.contract.commands.worker_count import quantity
from elasticjob._runtime.contract.failures.failure_text import describe_size
from elasticjob_operator.model.cluster.raw import Raw, mapping, objects, text

CPU = "cpu"
LEAST_CPU_LIMIT = 0.5
"""A CPU limit, where a LimitRange demands one, in cores: the API server's throttling would delay rounds below that."""
_PARTS = ("per Container is", "per Pod is", "must be less than or equal to")
"""Parts of the API server's messages about a container that breaks a LimitRange, or the defaults of one."""


def breaks_limit_range(problem: str) -> bool:
    """Return whether the API server's message is about requests and limits that a LimitRange does not admit."""
    return any(part in problem for part in _PARTS)


@dataclass(frozen=True)
class Bounds:
    """What all LimitRanges together demand of one resource of a container; None: nothing."""

    least: float | None = None
    most: float | None = None
    ratio: float | None = None
    """The largest quotient of limit and request."""
    default_limit: float | None = None
    """The limit of a container that has none."""


def read_bounds(limit_ranges: Iterable[Raw], resource: str) -> Bounds:
    """Return what LimitRanges demand of a resource of a pod's only container."""
    items = [i for r in limit_ranges for i in objects(r, "spec", "limits") if text(i, "type") in ("Container", "Pod")]

    def amounts(field: str) -> list[float]:
        return [quantity(mapping(item, field)[resource]) for item in items if resource in mapping(item, field)]

    return Bounds(
        least=max(amounts("min"), default=None),
        most=min(amounts("max"), default=None),
        ratio=min((max(1.0, ratio) for ratio in amounts("maxLimitRequestRatio")), default=None),
        default_limit=min(amounts("default"), default=None),
    )


def fit_resources(resources: Raw, own: Raw, limit_ranges: Iterable[Raw]) -> dict[str, Any]:
    """Return requests and limits that the LimitRanges admit, as near as possible to `resources`.

    What the job itself says (`own`) stays: the API server then refuses it in its own words.
    """
    limit_ranges = tuple(limit_ranges)
    requests, limits = dict(mapping(resources, "requests")), dict(mapping(resources, "limits"))
    for name in {*requests, *limits}:
        bounds = read_bounds(limit_ranges, name)
        fixed = name in mapping(own, "requests"), name in mapping(own, "limits")
        request, limit = _fit(_amount(requests, name), _amount(limits, name), bounds, name == CPU)
        if request is not None and not fixed[0]:
            requests[name] = _written(request, name) if request != _amount(requests, name) else requests[name]
        if limit is not None and not fixed[1]:
            limits[name] = _written(limit, name) if limit != _amount(limits, name) else limits[name]
    return {"requests": requests, "limits": limits}


def _fit(request: float | None, limit: float | None, bounds: Bounds, cpu: bool) -> tuple[float | None, float | None]:
    most = math.inf if bounds.most is None else bounds.most
    if request is not None and bounds.least is not None:
        request = max(request, bounds.least)
    if limit is None and (bounds.ratio is not None or bounds.most is not None):
        needed = (request or 0.0) * (bounds.ratio or 1.0)
        limit = max(needed, LEAST_CPU_LIMIT if cpu else 0.0)
    elif limit is None and request is not None and bounds.default_limit is not None and bounds.default_limit < request:
        limit = request
    if limit is not None:
        limit = min(max(limit, request or 0.0), most)
        request = None if request is None else min(request, limit)
        if request is not None and bounds.ratio is not None and limit > request * bounds.ratio:
            request = limit / bounds.ratio
    return request, limit


def _amount(amounts: Mapping[str, Any], name: str) -> float | None:
    return quantity(amounts[name]) if name in amounts else None


def _written(amount: float, name: str) -> str:
    """Return an amount as a quantity, rounded up to whole millicores or bytes."""
    return f"{math.ceil(round(amount * 1000, 6))}m" if name == CPU else describe_size(math.ceil(amount))

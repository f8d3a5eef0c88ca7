"""Fields of the status that 0.1.0 wrote as texts, as the lists and objects that programs read.

Until v1alpha1 ends, status has both. The operator reads the text where there is one: an operator of 0.1.0 that takes a
job over after a rollback writes only the text and keeps the list as it was, so after the next upgrade the list may be
old, and an old incarnation or an outage that is charged again would do harm. The lists are read where the text is
absent, as an operator will leave it that does not write texts any more.

Sets of indices are ranges. A list with a number for each of 4096 nodes is as many lines of `kubectl get -o yaml`, and
almost all nodes of such a job have the same incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.model.cluster.raw import (
    Raw,
    at,
    integer,
    is_number,
    mapping,
    objects,
    sequence,
    text,
    whole_number,
)

MAX_INDICES = 8192
"""Bound of the indices that a range may have, so that a status that something else wrote takes no memory. A job has
4096 nodes, 64 spares and some pods for cordoned nodes at most."""
_START = "start-"
_LISTS = ("incarnationRanges", "lastChargedRound", "chargedFailures", "uncountedFailures")
_INNER_LISTS = {"scaledDown": "indexRanges", "rendezvous": "lastRound", "goodput": "lastRound"}


def without_lists(status: Raw) -> Raw:
    """Return a status without the fields that 0.1.0 does not have: they say the same as the texts."""
    kept = {name: value for name, value in status.items() if name not in _LISTS}
    for name, inner in _INNER_LISTS.items():
        if name in kept:
            kept[name] = {key: value for key, value in mapping(kept, name).items() if key != inner}
    return kept


def incarnation_ranges(incarnations: Sequence[int]) -> list[dict[str, int]]:
    """Return the incarnation of each index from 0 on as ranges of indices with the same one, without gaps."""
    ranges: list[dict[str, int]] = []
    for index, incarnation in enumerate(incarnations):
        if ranges and ranges[-1]["incarnation"] == incarnation:
            ranges[-1]["last"] = index
        else:
            ranges.append({"first": index, "last": index, "incarnation": incarnation})
    return ranges


def read_incarnations(status: Raw) -> tuple[int, ...]:
    """Return the incarnation of each index; the ranges end at the first one that does not continue the others."""
    if isinstance(at(status, "incarnations"), str):
        listed = text(status, "incarnations")
        return tuple(map(whole_number, listed.split(","))) if listed else ()
    found: list[int] = []
    for item in objects(status, "incarnationRanges"):
        first, last, incarnation = (integer(item, name, default=-1) for name in ("first", "last", "incarnation"))
        if first != len(found) or not first <= last < MAX_INDICES or incarnation < 0:
            break
        found.extend([incarnation] * (last - first + 1))
    return tuple(found)


def index_ranges(indices: Iterable[int]) -> list[dict[str, int]]:
    """Return a set of indices as ranges, in order."""
    ranges: list[dict[str, int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1]["last"] == index - 1:
            ranges[-1]["last"] = index
        else:
            ranges.append({"first": index, "last": index})
    return ranges


def read_indices(scaled_down: Raw) -> frozenset[int]:
    """Return the indices in `status.scaledDown`, without values that are not an index."""
    if isinstance(at(scaled_down, "indices"), str):
        return frozenset(map(whole_number, filter(is_number, text(scaled_down, "indices").split(","))))
    return read_ranges(scaled_down, "indexRanges")


def read_ranges(record: Raw, name: str) -> frozenset[int]:
    """Return the indices in the ranges at `name`, without values that are not a range."""
    return frozenset(_indices(objects(record, name)))


def vacant_ranges(vacant: Iterable[int], incarnations: Sequence[int]) -> list[dict[str, int]]:
    """Return vacant indices as ranges, each with the incarnation of the last pod of its indices."""
    ranges: list[dict[str, int]] = []
    for index in sorted(vacant):
        incarnation = incarnations[index] if index < len(incarnations) else 0
        if ranges and (ranges[-1]["last"], ranges[-1]["incarnation"]) == (index - 1, incarnation):
            ranges[-1]["last"] = index
        else:
            ranges.append({"first": index, "last": index, "incarnation": incarnation})
    return ranges


def read_vacant(status: Raw) -> frozenset[int]:
    """Return the vacant indices, without those that have got a pod since from an operator that knows no vacant ones."""
    incarnations = read_incarnations(status)
    found = set()
    for item in objects(status, "vacantIndices"):
        known = integer(item, "incarnation", default=-1)
        for index in _indices([item]):
            if known in (-1, incarnations[index] if index < len(incarnations) else known):
                found.add(index)
    return frozenset(found)


def _indices(ranges: Iterable[Raw]) -> Iterator[int]:
    for item in ranges:
        first, last = (integer(item, name, default=-1) for name in ("first", "last"))
        if 0 <= first <= last < MAX_INDICES:
            yield from range(first, last + 1)


def round_object(round_id: RoundId) -> dict[str, int]:
    """Return the identity of a round as an object."""
    return {
        "executionAttempt": round_id.attempt,
        "storeIncarnation": round_id.store_incarnation,
        "number": round_id.number,
    }


def parse_round(written: str) -> RoundId | None:
    """Return the round of this name; None if it is none."""
    try:
        return RoundId.parse(written)
    except ValueError:
        return None


def recorded_round(record: Raw, name: str, object_name: str) -> RoundId | None:
    """Return the round in the text at `name`, else in the object at `object_name`; None if it is in neither."""
    if isinstance(at(record, name), str):
        return parse_round(text(record, name))
    return _parse_round_object(mapping(record, object_name))


def _parse_round_object(raw: Raw) -> RoundId | None:
    parts = [integer(raw, name, default=-1) for name in ("executionAttempt", "storeIncarnation", "number")]
    return RoundId(*parts) if min(parts) >= 0 else None


def outage_objects(outages: Iterable[str]) -> list[dict[str, Any]]:
    """Return outages, by their names (`budget.outage_of`), as objects with a member that `type` names."""
    return [_outage_object(outage) for outage in outages]


def _outage_object(outage: str) -> dict[str, Any]:
    round_id = parse_round(outage)
    if round_id is not None:
        return {"type": "Round", "round": round_object(round_id)}
    number = outage.removeprefix(_START)
    if number != outage and is_number(number):
        return {"type": "PodStart", "podStart": int(number)}
    return {"type": "Pod", "pod": outage}


def read_outages(status: Raw, name: str, object_name: str) -> tuple[str, ...]:
    """Return the names of the outages in the texts at `name`, else in the objects at `object_name`."""
    if isinstance(at(status, name), list):
        return tuple(str(item) for item in sequence(status, name))
    return tuple(filter(None, map(_parse_outage, objects(status, object_name))))


def _parse_outage(raw: Raw) -> str:
    match text(raw, "type"):
        case "Round":
            round_id = _parse_round_object(mapping(raw, "round"))
            return str(round_id) if round_id else ""
        case "PodStart":
            return f"{_START}{integer(raw, 'podStart')}"
    return text(raw, "pod")

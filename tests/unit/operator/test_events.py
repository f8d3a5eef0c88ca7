"""Events about jobs: what they contain, and what becomes of an Event that is recorded again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import EventRecord
from elasticjob_operator.events import MAX_MESSAGE, Recorder
from elasticjob_operator.kube import EVENTS
from elasticjob_operator.model.raw import timestamp
from support.operator_build import NOW, UID, job
from support.operator_world import Api

RECORD = EventRecord("InsufficientCapacity", "no room", key="capacity", warning=True, repeats=True)


async def record(*records: EventRecord) -> list[dict[str, Any]]:
    """Record these, one second after the other; return the Events that there are then."""
    api = Api(NOW)
    recorder = Recorder(api, "operator-1")
    for second, each in enumerate(records):
        await recorder.record(job(), each, NOW + second)
    return [raw for (resource, _), raw in api.objects.items() if resource is EVENTS]


async def test_an_event_is_about_the_job() -> None:
    (event,) = await record(replace(RECORD, message="x" * 5000))
    picked = {name: event[name] for name in ("type", "reason", "count", "reportingInstance", "firstTimestamp")}
    assert picked == {
        "type": "Warning", "reason": "InsufficientCapacity", "count": 1, "reportingInstance": "operator-1",
        "firstTimestamp": timestamp(NOW),
    }  # fmt: skip
    about = {"kind": "ElasticJob", "apiVersion": "elasticjob.dev/v1alpha1", "namespace": "ns", "name": "bert"}
    assert event["involvedObject"] == {**about, "uid": UID}
    assert len(event["message"]) == MAX_MESSAGE
    (normal,) = await record(EventRecord("Completed", "done", key="end"))
    assert normal["type"] == "Normal"


@pytest.mark.parametrize(("repeats", "count", "message"), [(True, 3, "worse"), (False, 1, "no room")])
async def test_a_repeated_event_is_counted_or_left_as_it_is(repeats: bool, count: int, message: str) -> None:
    known = replace(RECORD, repeats=repeats)
    (event,) = await record(known, known, replace(known, message="worse"))
    assert (event["count"], event["message"]) == (count, message)
    assert event["lastTimestamp"] == timestamp(NOW + (2 if repeats else 0))


async def test_another_cause_or_reason_is_another_event() -> None:
    assert len(await record(RECORD, replace(RECORD, key="other"), replace(RECORD, reason="Straggler"))) == 3


async def test_an_event_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(NOW, refused=EVENTS)
    await Recorder(api, "me").record(job(), RECORD, NOW)
    assert "Event InsufficientCapacity was not written" in caplog.text

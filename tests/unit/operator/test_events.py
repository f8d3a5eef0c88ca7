"""Events about jobs: what they contain, and what becomes of an Event that is recorded again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.actions import EventRecord
from elasticjob_operator.kube import EVENTS, Resource
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.reconcile.events import MAX_MESSAGE, Recorder
from support.operator.build import NOW, UID, job
from support.operator.world import Api

RECORD = EventRecord("InsufficientCapacity", "no room", key="capacity", warning=True, repeats=True)


async def record(*records: EventRecord) -> list[dict[str, Any]]:
    """Record these, one second after the other; return the Events that there are then."""
    api = Api(NOW)
    recorder = Recorder(api, "operator-1")
    for second, each in enumerate(records):
        recorder.record(job(), each, NOW + second)
    await recorder.flush()
    return events(api)


def events(api: Api) -> list[dict[str, Any]]:
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
    recorder = Recorder(Api(NOW, refused=EVENTS), "me")
    recorder.record(job(), RECORD, NOW)
    await recorder.flush()
    assert "Event InsufficientCapacity was not written" in caplog.text


class Written(Api):
    """An API server that tells which Events are created."""

    def __init__(self) -> None:
        super().__init__(NOW)
        self.reasons: asyncio.Queue[str] = asyncio.Queue()

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.reasons.put_nowait(body["reason"])
        return await super().create(resource, namespace, body)


async def test_events_are_written_while_the_recorder_runs() -> None:
    api = Written()
    recorder = Recorder(api, "me")
    running = asyncio.create_task(recorder.run())
    for reason in ("First", "Second"):
        recorder.record(job(), replace(RECORD, reason=reason), NOW)
        assert await asyncio.wait_for(api.reasons.get(), 10.0) == reason
    running.cancel()


class Unanswered(Api):
    """An API server that answers no request about an Event until it is `healed`."""

    def __init__(self) -> None:
        super().__init__(NOW)
        self.healed = asyncio.Event()

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        await self.healed.wait()
        return await super().create(resource, namespace, body)


async def test_an_operator_that_stops_writes_the_events_that_wait() -> None:
    api = Unanswered()
    recorder = Recorder(api, "me")
    recorder.record(job(), RECORD, NOW)
    running = asyncio.create_task(recorder.run())
    await asyncio.sleep(0)
    running.cancel()
    asyncio.get_running_loop().call_soon(api.healed.set)
    await recorder.finish()
    assert len(events(api)) == 1


async def test_an_operator_that_stops_does_not_wait_long_for_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elasticjob_operator.reconcile.events.FINISH_SECONDS", 0.01)
    recorder = Recorder(Unanswered(), "me")
    recorder.record(job(), RECORD, NOW)
    await recorder.finish()
    assert "1 Event not written" in caplog.text


async def test_too_many_events_are_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("elasticjob_operator.reconcile.events.MOST_WAITING", 2)
    assert len(await record(*(replace(RECORD, key=str(number)) for number in range(3)))) == 2
    assert "too many wait" in caplog.text

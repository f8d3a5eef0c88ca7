"""Messages are decoded as they were encoded; other data is refused."""

import json
from typing import Any

import pytest

from elasticjob.contract import messages as m
from elasticjob.contract.codec import MessageError
from elasticjob.contract.names import RoundId

ROUND = RoundId(1, 0, 7)
START = m.StartRound(ROUND, 0, 2, 0, 4, 0, 4, "10.0.0.1", 4000, 0, 3)
FAILURE = m.Failure(m.FailureClass.KILLED, "bert-0-0", 1.5, rank=3, signal="SIGKILL")
SETTINGS = m.RoundSettings(min_nodes=2, max_nodes=4, target=3)


@pytest.mark.parametrize(
    "message",
    [
        m.Announce(
            0, 0, "b", "bert-0-0", "10.0.0.1", 4000, 2, membership=m.LastMembership(START, m.MemberState.RUNNING)
        ),
        m.Ready(),
        m.WorkersFailed(ROUND, FAILURE),
        m.WorkersStalled(ROUND, FAILURE),
        START,
        m.EndRound(ROUND, 1.0, "because"),
        m.Finish(m.Outcome.FAILED, "MaxRestartsExceeded"),
        m.OperatorView(1, 2, SETTINGS, 0, ROUND, (m.ExpectedPod(0, 0, "bert-0-0", m.PodState.RUNNING),)),
        m.OperatorView(1, 3, SETTINGS, 0, ROUND, finish=m.Finish(m.Outcome.SUCCEEDED, "AllAgentsSucceeded")),
        m.Report(0, m.RoundPhase.RUNNING, "formed", ROUND, 1, 4, 2.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_decoded_as_it_was_encoded(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "want an object"),
        (b'{"type":"Nope"}', "unknown message type 'Nope'"),
        (b'{"type":["Ready"]}', "unknown message type"),
        (b'{"type":"Leaving"}', "Leaving.reason: missing"),
        (b'{"type":"Leaving","reason":1}', "Leaving.reason: want str, got int"),
        (b'{"type":"WorkersStarted","round":"1.2"}', "WorkersStarted.round: not a RoundId"),
        (b'{"type":"WorkersStopped","round":"1.0.1","store_port":true}', "store_port: want int, got bool"),
        (b'{"type":"EndRound","round":"1.0.1","grace_seconds":NaN,"reason":""}', "grace_seconds: want float"),
    ],
)
def test_invalid_data_is_refused_with_its_path(raw: bytes, error: str) -> None:
    with pytest.raises(MessageError, match=error.replace("[", r"\[").replace(".", r"\.")):
        m.decode(raw)


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert m.decode(json.dumps({"type": "Leaving", "reason": "x", "new": 1}).encode()) == m.Leaving("x")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"min_nodes": 0}, "at least 1"),
        ({"min_nodes": 5}, "at least min_nodes"),
        ({"target": 9}, "within 2 and 4"),
        ({"max_restarts": -1}, "negative"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        m.RoundSettings(**({"min_nodes": 2, "max_nodes": 4, "target": 3} | settings))


def test_round_ids_are_ordered_by_attempt_then_store_then_count() -> None:
    ids = [RoundId(2, 0, 1), RoundId(1, 1, 1), RoundId(1, 0, 9)]
    assert sorted(ids) == ids[::-1]
    assert RoundId.parse("1.0.9") == RoundId(1, 0, 9)

"""Messages are decoded as they were encoded; other data is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract import messages as m
from elasticjob._runtime.contract.codec import MessageError
from elasticjob._runtime.contract.failures.failure_rules import FailureAction, FailureRule
from elasticjob._runtime.contract.messages import wire_form
from elasticjob._runtime.contract.names import RoundId

ROUND = RoundId(1, 0, 7)
FAIL_JOB = FailureAction.FAIL_JOB
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
        (b'{"type":"EndRound","round":"1.0.1","grace_seconds":NaN,"reason":""}', "grace_seconds: not a number from"),
    ],
)
def test_invalid_data_is_refused_with_its_path(raw: bytes, error: str) -> None:
    with pytest.raises(MessageError, match=error.replace("[", r"\[").replace(".", r"\.")):
        m.decode(raw)


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert m.decode(json.dumps({"type": "Leaving", "reason": "x", "new": 1}).encode()) == m.Leaving("x")


RULE = {"name": "oom", "action": "FailJob"}
POD = {"index": 0, "incarnation": 0, "pod": "bert-0-0"}


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"hang_action": "Reboot"}, {}),
        ({"failure_rules": [{**RULE, "action": "Wait"}, RULE]}, {"failure_rules": (FailureRule("oom", FAIL_JOB),)}),
    ],
)
def test_an_unknown_value_counts_as_absent(settings: dict[str, Any], known: dict[str, Any]) -> None:
    """A store reads the settings of a newer operator from its environment too."""
    raw = {"min_nodes": 2, "max_nodes": 4, "target": 3}
    assert codec.parse(m.RoundSettings, raw | settings) == replace(SETTINGS, **known)


def test_a_pod_in_an_unknown_state_counts_as_running() -> None:
    assert codec.parse(m.ExpectedPod, {**POD, "state": "frozen"}).state is m.PodState.RUNNING


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"outcome": "Won", "reason": ""}, "outcome: not a Outcome: 'Won'"),
        (
            {"outcome": "Failed", "reason": "", "failure": {"kind": 1, "pod": "a", "time": 1}},
            "kind: not a FailureClass",
        ),
        ({"outcome": "Failed", "reason": "", "round": "now"}, "round: not a RoundId"),
    ],
)
def test_an_unknown_value_of_a_required_field_and_an_invalid_one_are_refused(raw: dict[str, Any], error: str) -> None:
    with pytest.raises(MessageError, match=error):
        codec.parse(m.Termination, raw)


def test_a_termination_message_whose_class_of_failure_is_unknown_keeps_its_outcome() -> None:
    raw = {"outcome": "Failed", "reason": "r", "failure": {"kind": "Melted", "pod": "a", "time": 1}}
    assert codec.parse(m.Termination, raw) == m.Termination(m.Outcome.FAILED, "r")


def test_an_older_peer_gets_another_value_instead_of_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here LOST is the new one; a member of another enum that is equal stays."""
    lost = m.ExpectedPod(0, 0, "bert-0-0", m.PodState.LOST)
    view = m.OperatorView(1, 2, SETTINGS, 0, ROUND, (lost,), finish=m.Finish(m.Outcome.FAILED, "lost"))
    monkeypatch.setattr(wire_form, "NEW_VALUES", (m.NewValue(m.PodState.LOST, 3, m.PodState.DRAINING),))
    assert m.decode(m.encode(view, 3)) == view
    assert m.decode(m.encode(view, 2)) == replace(view, pods=(replace(lost, state=m.PodState.DRAINING),))
    monkeypatch.setattr(wire_form, "NEW_VALUES", (m.NewValue(FAIL_JOB, 3, FailureAction.IGNORE),))
    hang = m.OperatorView(1, 2, replace(SETTINGS, hang_action=m.HangAction.FAIL_JOB), 0, ROUND)
    assert m.decode(m.encode(hang, 2)) == hang


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


@pytest.mark.parametrize("seconds", ["1" + 400 * "0", "-1" + 400 * "0", "1e999", "NaN"])
def test_numbers_that_no_float_can_hold_are_refused(seconds: str) -> None:
    with pytest.raises(MessageError):
        codec.parse(m.NewProcesses, codec.loads(f'{{"start_seconds": {seconds}}}'.encode()))


@pytest.mark.parametrize("seconds", ["1e300", "-1e19", str(1 << 63), "1" + 300 * "0"])
def test_numbers_that_eight_bytes_cannot_hold_are_refused(seconds: str) -> None:
    with pytest.raises(MessageError, match="not a number from"):
        codec.parse(m.NewProcesses, codec.loads(f'{{"start_seconds": {seconds}}}'.encode()))
    with pytest.raises(MessageError, match=r"not a number from|want int"):
        codec.parse(m.NewProcesses, codec.loads(f'{{"count": {seconds}}}'.encode()))


def test_a_list_that_no_job_is_large_enough_for_is_refused() -> None:
    raw = {"type": "WorkersStopped", "round": "1.0.1", "store_port": 1, "ended_ranks": [0] * (codec.MAX_ITEMS + 1)}
    with pytest.raises(MessageError, match="ended_ranks: 100001 items"):
        m.decode(codec.dumps(raw))


def test_what_a_worker_said_has_no_control_characters() -> None:
    failure = m.Failure(m.FailureClass.USER_ERROR, "a", 1.0, exception="E\x07", message="\x1b[31m\u202e\ud800\n\tred")
    assert (failure.exception, failure.message) == (r"E\x07", "\\x1b[31m\\u202e\\ud800\n\tred")

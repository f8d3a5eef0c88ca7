"""The termination message: its size limit, and the fields that always stay."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from elasticjob._runtime.agent.reporting.termination_message import (
    MAX_BYTES,
    read_round,
    termination_json,
    write_round,
    write_termination,
)
from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import Failure, FailureClass, InRound, Outcome, Termination
from elasticjob._runtime.contract.names import RoundId

text = st.text(max_size=6000)


@given(st.sampled_from(Outcome), text, text, text, text)
def test_a_termination_message_fits_and_keeps_outcome_round_and_rank(
    outcome: Outcome, reason: str, message: str, exception: str, failure_message: str
) -> None:
    failure = Failure(
        FailureClass.USER_ERROR, "pod", 1.0, rank=7, exit_code=1, exception=exception, message=failure_message
    )
    data = termination_json(Termination(outcome, reason, RoundId(1, 2, 3), message, failure))
    assert len(data) <= MAX_BYTES
    assert data.startswith(b'{"outcome":"%s"' % outcome.value.encode())
    back = codec.parse(Termination, json.loads(data))
    assert back.round == RoundId(1, 2, 3)
    assert back.failure is not None
    assert back.failure.rank == 7


def test_the_round_stands_in_the_message_until_the_agent_writes_how_it_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "termination")
    assert read_round(path) is None
    write_round(path, RoundId(1, 0, 9))
    write_round(path, RoundId(1, 0, 10))
    assert read_round(path) == RoundId(1, 0, 10)
    write_termination(path, Termination(Outcome.ERROR, "AgentBroke", read_round(path)))
    assert codec.parse(Termination, json.loads(Path(path).read_text())).round == RoundId(1, 0, 10)
    Path(path).write_text("{broken")
    assert read_round(path) is None


def test_a_shorter_message_replaces_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "termination"
    termination = Termination(Outcome.ERROR, "AgentBroke", RoundId(1, 0, 10), "x" * 500)
    write_termination(str(path), termination)
    write_round(str(path), RoundId(1, 0, 11))
    assert path.read_bytes() == codec.dumps(InRound(RoundId(1, 0, 11)))
    write_termination("/dev/null", termination)  # no file whose length can be set

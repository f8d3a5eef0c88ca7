"""The termination message: its size limit, and the fields that always stay."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from elasticjob.agent.reporting.termination_message import MAX_BYTES, termination_json
from elasticjob.contract import codec
from elasticjob.contract.messages import Failure, FailureClass, Outcome, Termination
from elasticjob.contract.names import RoundId

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

"""`status.goodput`: how much of the job's time faults have cost. It is written together with other changes, and alone
only if `lostSeconds` grew."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.model.cluster.raw import mapping, moment, real, text, timestamp
from elasticjob_operator.model.job.status_lists import recorded_round, round_object
from elasticjob_operator.plan.job_status.decisions import Decisions

FIELD = "goodput"
_TIME = "lastUpdatedTime"


def goodput(decisions: Decisions) -> dict[str, Any] | None:
    """Return the field; None before the first round. It counts the time from then on, without suspensions.

    While no round runs it stays as it is: the time is counted when the next one runs, and so is what of it is lost.
    """
    before = dict(mapping(decisions.inputs.status.raw, FIELD))
    if not before and not decisions.training.formed:
        return None
    if decisions.resumes:
        return {name: value for name, value in before.items() if name != _TIME}
    lost, round_ = _lost(decisions, before)
    ends = decisions.outcome is not None and not decisions.inputs.status.outcome_declared
    since = moment(before, _TIME)
    if decisions.training.formed or (ends and since is not None):
        elapsed = 0.0 if since is None else max(0.0, int(decisions.inputs.now) - since)
        time: str | None = timestamp(decisions.inputs.now)
    else:
        elapsed, time = 0.0, text(before, _TIME) or None
    known = real(before, "lostSeconds")
    total = real(before, "productiveSeconds") + known + elapsed
    lost_seconds = round(known + lost, 3)
    productive = round(max(0.0, total - lost_seconds), 3)
    whole = productive + lost_seconds
    record = {
        "productiveSeconds": productive,
        "lostSeconds": lost_seconds,
        "percent": round(100 * productive / whole, 1) if whole else 100.0,
        "round": str(round_) if round_ else None,
        "lastRound": round_object(round_) if round_ else None,
        _TIME: time,
    }
    return {name: value for name, value in record.items() if value is not None}


def _lost(decisions: Decisions, before: dict[str, Any]) -> tuple[float, RoundId | None]:
    """Return the seconds that status does not include yet, and the last round whose lost time it includes then."""
    last = recorded_round(before, "round", "lastRound")
    new = [
        e for e in (decisions.inputs.report.lost if decisions.inputs.report else ()) if last is None or e.round > last
    ]
    return sum(e.seconds for e in new), new[-1].round if new else last

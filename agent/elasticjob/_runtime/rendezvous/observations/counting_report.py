"""Which report about the training the coordinator keeps, where several agents report. Pure; no rule depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.contract.messages import TrainingProgress


@dataclass(frozen=True)
class CountingReport:
    """The last report that counts."""

    progress: TrainingProgress
    agent_id: str


def counts(kept: CountingReport | None, progress: TrainingProgress, agent_id: str) -> bool:
    """Return whether a report of the current round replaces the one that is kept.

    What a script reports itself comes before what its output shows. Of several agents whose workers write steps, the
    first one to show a step counts.
    """
    if kept is None or kept.progress.round != progress.round or not progress.from_log:
        return True
    return kept.progress.from_log and (agent_id == kept.agent_id or progress.step > kept.progress.step)

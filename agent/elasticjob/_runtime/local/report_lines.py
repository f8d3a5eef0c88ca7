"""The lines that a local run prints about the reports of its coordinator. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticjob._runtime.agent.state_machine.endings.outcomes import describe_failure
from elasticjob._runtime.contract.failures.failure_text import in_stage
from elasticjob._runtime.contract.messages import EndReason, Outcome, Report, RoundEnded, Straggler
from elasticjob._runtime.contract.names import ExitCode, RoundId
from elasticjob._runtime.contract.text import with_noun
from elasticjob._runtime.local.waits import describe_phase

INTERRUPTED = 130
"""Exit code after SIGINT or SIGTERM."""


class ReportLines:
    """Compares each report with the one before it."""

    def __init__(self) -> None:
        self._before: Report | None = None
        self._stepped_round: RoundId | None = None
        """The last round in which the script has reported a step."""

    def lines(self, report: Report, newly_ended: Sequence[RoundEnded]) -> list[str]:
        """Return what has changed with this report. `newly_ended`: the rounds that no earlier report contained."""
        before, self._before = self._before, report
        ends = [
            _describe_end(ended)
            for ended in newly_ended
            if ended.reason is not EndReason.SUCCEEDED and not _ends_job(ended, report)
        ]
        return [*ends, *self._changes(before, report)]

    def _changes(self, before: Report | None, report: Report) -> Iterator[str]:
        if report.formed_at and (before is None or before.formed_at != report.formed_at):
            yield f"round {report.round} runs{in_stage(report.stage)}: {_world(report)}"
        elif report.stage > 1 and before is not None and before.stage != report.stage and report.formed_at:
            yield f"round {report.round} comes to stage {report.stage}"
        elif (
            not report.formed_at
            and report.outcome is None
            and report.reason
            and (before is None or before.reason != report.reason)
        ):
            yield describe_phase(report)
        if (step := report.progress) is not None and step.round == report.round and step.round != self._stepped_round:
            self._stepped_round = step.round
            where = in_stage(report.stage)
            yield f"round {step.round} trains{where}: step {step.step} is the first one that was reported"
        if report.stall is not None and (before is None or before.stall != report.stall):
            yield f"{describe_failure(report.stall)} on {report.stall.pod}; nothing is restarted"
        if before is not None and before.round == report.round and before.straggler != report.straggler:
            yield _describe_straggler(report.straggler)


def run_result(report: Report | None, problem: str, restarts: int) -> tuple[int, str]:
    """Return the exit code of a run and how it ended. `problem`: why the run itself failed; empty if it did not."""
    counted = with_noun(restarts, "restart")
    if report is not None and report.outcome is Outcome.SUCCEEDED:
        return ExitCode.SUCCEEDED, f"succeeded; {counted}"
    if report is not None and report.outcome is Outcome.FAILED:
        failure = report.failure
        why = f"{describe_failure(failure)} on {failure.pod}" if failure else report.reason
        reason = f" ({report.reason})" if failure else ""
        return ExitCode.FAILED, f"failed: {why}; {counted}{reason}"
    return (ExitCode.FAILED, f"failed: {problem}") if problem else (INTERRUPTED, "was interrupted")


def _world(report: Report) -> str:
    return f"{with_noun(report.world_size, 'worker')} on {with_noun(report.active, 'pod')}"


def _describe_end(ended: RoundEnded) -> str:
    cause = describe_failure(ended.failure) if ended.failure else ended.message
    charged = " (counts as a restart)" if ended.charged else ""
    return f"round {ended.round} ended: {ended.reason.value}: {cause}{charged}"


def _ends_job(ended: RoundEnded, report: Report) -> bool:
    """Return whether the job's last line describes the end of this round too."""
    return report.outcome is Outcome.FAILED and ended.failure is not None and ended.failure == report.failure


def _describe_straggler(slow: Straggler | None) -> str:
    if slow is None:
        return "all ranks keep up again"
    own, others = 1000 * slow.own_seconds, 1000 * slow.median_seconds
    return (
        f"rank {slow.rank} on {slow.pod} holds up every step: {own:.0f} ms of its own, {others:.0f} ms on other ranks"
    )

"""Look for the patterns of `spec.logRules` in what the workers of a round write."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elasticjob._runtime.agent.reporting.reported_training import ReportedStep, ReportedTraining
from elasticjob._runtime.agent.reporting.worker_output import OutputLine
from elasticjob._runtime.contract.log_rules.line_pattern import MAX_LINE, LinePattern
from elasticjob._runtime.contract.log_rules.rules import (
    STEP,
    TOTAL,
    LocalRanks,
    LogAction,
    LogCondition,
    LogRule,
    LogRuleError,
    compile_rules,
)
from elasticjob._runtime.contract.messages import Failure, FailureClass, Metric, StartRound, TrainingProgress
from elasticjob._runtime.contract.names import RoundId
from elasticjob._runtime.contract.text import printable

log = logging.getLogger(__name__)

_MAX_STEP = 2**53
_MAX_VALUE = 64
"""Characters of a metric's value."""
_MAX_SHOWN = 200
"""Characters of a line in the log."""


@dataclass(frozen=True)
class LogStep:
    """The last step that the output of this pod's workers shows."""

    step: int
    time: float
    """When its line was read, in seconds of time.monotonic."""


@dataclass(frozen=True)
class MetCondition:
    """A condition that is met, for the first time in its round."""

    round: RoundId
    failure: Failure
    ends_round: bool
    """False: it is only reported."""


class LogWatch:
    """Call `begin_round` when a round starts, `feed` with each line, `end_round` when the workers are to stop.

    Several ranks may write the same step. The first one to show it counts: a rank counts if its step is higher than the
    present one, or if the present one came from it. A step may become lower, as where each epoch counts from 0.
    """

    def __init__(self, pod: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pod = pod
        self._clock = clock
        self.on_step: Callable[[], None] = lambda: None
        """Called when a line shows a step."""
        self.on_condition: Callable[[MetCondition], None] = lambda _: None
        """Called once in a round for each condition that is met."""
        self._start: StartRound | None = None
        self._begin(None, ())

    def begin_round(self, start: StartRound) -> None:
        """Look for the patterns of this round's rules from now on, in the output of its workers only."""
        try:
            self._begin(start, compile_rules(start.log_rules))
        except LogRuleError as error:  # the operator has refused it: one of a later version may not
            log.warning("the output of workers is not looked at: %s", error)
            self._begin(None, ())

    def _begin(self, start: StartRound | None, patterns: Sequence[LinePattern]) -> None:
        self._start = start
        self._rules: tuple[tuple[LogRule, LinePattern], ...] = ()
        if start is not None:
            self._rules = tuple(zip(start.log_rules, patterns, strict=True))
        self._matches: Counter[str] = Counter()
        self._training: ReportedTraining | None = None
        self._steps: dict[int, int] = {}
        """The last step of each local rank."""
        self._last: LogStep | None = None
        self._leader = -1
        """The local rank whose step is reported."""
        self._metrics: dict[str, str] = {}
        self._since: dict[tuple[LogRule, LogCondition, int], float] = {}
        """Since when all values of a local rank have been as a condition says."""
        self._met: set[tuple[LogRule, LogCondition]] = set()

    def end_round(self) -> None:
        """Ignore all further lines. What has been found stays until the next round begins."""
        self._start = None

    def log_unmatched(self) -> None:
        """Log which rules of the last round have matched nothing, once for a round."""
        for rule, _ in self._rules:
            if not self._matches[rule.name]:
                log.info("log rule %s matched no line of this pod's workers in the last round", rule.name)
        self._rules = ()

    def feed(self, round_id: RoundId, local_rank: int, lines: Sequence[OutputLine]) -> None:
        """Take lines that a worker of this round has written."""
        start, now = self._start, self._clock()
        if start is None or round_id != start.round or not self._rules:
            return
        for line in lines:
            text = line.text[:MAX_LINE].decode(errors="replace")
            for rule, pattern in self._rules:
                if local_rank and rule.local_ranks is LocalRanks.FIRST:
                    continue
                if (groups := pattern.find(text)) is not None:
                    self._matched(start, rule, local_rank, groups, text, now)

    @property
    def last_step(self) -> LogStep | None:
        """The step that was shown last, by any rank; None before the first one of the round."""
        return self._last

    def training(self) -> TrainingProgress | None:
        """Return what the output has shown in this round; None before the first step."""
        progress = self._training.progress if self._training is not None else None
        return None if progress is None else replace(progress, from_log=True)

    # ---- a line that matches -----------------------------------------------------------------------------------------

    def _matched(
        self, start: StartRound, rule: LogRule, local_rank: int, groups: dict[str, str], text: str, now: float
    ) -> None:
        if not self._matches[rule.name]:
            shown = printable(text[:_MAX_SHOWN])
            log.info("log rule %s matches a line of rank %d: %s", rule.name, start.rank + local_rank, shown)
        self._matches[rule.name] += 1
        step = _steps(groups.get(STEP, ""))
        if step is None or self._counts(local_rank, step, now):
            self._report(start.round, step, groups, now)
        for condition in rule.conditions:
            self._check(start, rule, condition, local_rank, groups, now)

    def _counts(self, local_rank: int, step: int, now: float) -> bool:
        """Record a rank's step. Return whether it is the one to report."""
        if self._steps.get(local_rank) != step:
            self._steps[local_rank] = step
            self._last = LogStep(step, now)
        if local_rank != self._leader and step <= self._steps.get(self._leader, -1):
            return False
        if local_rank == self._leader and self._training is not None and self._goes_back(step):
            self._training = None  # the seconds of a step are measured from here
        self._leader = local_rank
        return True

    def _goes_back(self, step: int) -> bool:
        progress = self._training.progress if self._training is not None else None
        return progress is not None and step < progress.step

    def _report(self, round_id: RoundId, step: int | None, groups: dict[str, str], now: float) -> None:
        self._metrics |= {
            name: printable(text[:_MAX_VALUE])
            for name, text in groups.items()
            if name not in (STEP, TOTAL) and _number(text) is not None
        }
        metrics = tuple(Metric(name, value) for name, value in self._metrics.items())
        self._training = self._training or ReportedTraining(round_id)
        self._training.add(ReportedStep(step, _steps(groups.get(TOTAL, "")), False, metrics), now)
        if step is not None:
            self.on_step()

    def _check(
        self, start: StartRound, rule: LogRule, condition: LogCondition, local_rank: int, groups: dict[str, str],
        now: float,
    ) -> None:  # fmt: skip
        text, key = groups.get(condition.metric, ""), (rule, condition, local_rank)
        value = _number(text)
        if value is None:
            return
        if not condition.holds(value):
            self._since.pop(key, None)
            return
        since = self._since.setdefault(key, now)
        if now - since < condition.for_seconds or (rule, condition) in self._met:
            return
        self._met.add((rule, condition))
        rank = start.rank + local_rank
        at = f" at step {self._steps[local_rank]}" if local_rank in self._steps else ""
        why = f"{condition.metric} is {text.strip()[:_MAX_VALUE]}{at} (log rule {rule.name}: {condition.describe()})"
        failure = Failure(
            FailureClass.USER_ERROR,
            self._pod,
            time.time(),
            rank=rank,
            message=why,
            log_rule=rule.name,
            ends_job=condition.action is LogAction.FAIL_JOB,
        )
        self.on_condition(MetCondition(start.round, failure, condition.action is not LogAction.EVENT))


def _number(text: str) -> float | None:
    """Return the number that a text is, NaN and infinity among them; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def _steps(text: str) -> int | None:
    """Return the number of steps that a text is; None if it is none."""
    number = _number(text)
    return int(number) if number is not None and 0 <= number <= _MAX_STEP else None

"""Check what all ranks of `faulty_training` have recorded: no step is lost, done twice or computed wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

TOLERANCE = 1e-9
"""Largest difference of two sums of the same numbers in another order; the numbers are around 1."""


@dataclass
class RoundRecord:
    """One round. Times are Unix seconds."""

    world: int
    begin: int
    """The step at which its ranks began."""
    processes: dict[int, int] = field(default_factory=dict)
    """Process ids by rank."""
    steps: dict[int, int] = field(default_factory=dict)
    """The last step by process id."""
    first_step_time: float = 0.0
    last_times: dict[int, float] = field(default_factory=dict)
    """The time of the last step by process id."""

    @property
    def complete(self) -> bool:
        return len(self.processes) == self.world

    @property
    def done_by_all(self) -> int:
        """The last step that all ranks have done."""
        return min(self.steps.values()) if self.complete else self.begin


class TrainingLedger:
    """All rounds so far. AssertionError at the first line that must not be."""

    def __init__(self) -> None:
        self.rounds: dict[str, RoundRecord] = {}
        self.gradients: dict[int, float] = {}
        """What the first rank that did a step computed, by step."""
        self.parameters: dict[int, float] = {}
        """By the number of steps done."""
        self.repeated = 0
        """Steps that were done again, because their only rank was lost."""
        self.set_up: dict[int, int] = {}
        """The last step that any rank had done when a process was set up for its function, by process id."""
        self.unrecorded: set[int] = set()
        """Steps that were done by a rank which was interrupted before it could record them."""

    @property
    def last_step(self) -> int:
        """The last step that any rank has done."""
        return max((max(r.steps.values(), default=0) for r in self.rounds.values()), default=0)

    def add(self, line: str) -> None:
        """Add a line of a rank."""
        kind, round_id, rank, world, pid, gradient, step, parameters, moment = line.split()
        if kind == "set-up":
            self.set_up[int(pid)] = self.last_step
            return
        if kind == "begin":
            self._begin(round_id, int(rank), int(world), int(pid), int(step))
        else:
            self._step(round_id, int(pid), int(step), float.fromhex(gradient), float(moment))
        _same(self.parameters, int(step), float.fromhex(parameters), f"parameters after {line}")

    def compare(self, alone: TrainingLedger) -> None:
        """Compare all steps with those of a single process."""
        assert {*self.gradients} | self.unrecorded == {*range(1, self.last_step + 1)}, "a step is missing"
        assert self.gradients.keys() | self.parameters.keys() <= alone.gradients.keys() | {0}
        for step, gradient in self.gradients.items():
            _same(alone.gradients, step, gradient, f"gradient of step {step} against a single process")
        for step, parameters in self.parameters.items():
            _same(alone.parameters, step, parameters, f"parameters after step {step} against a single process")

    def _begin(self, round_id: str, rank: int, world: int, pid: int, step: int) -> None:
        known = [r for key, r in self.rounds.items() if key != round_id]
        found = self.rounds.setdefault(round_id, RoundRecord(world, step))
        assert step == found.begin, f"round {round_id} begins at steps {found.begin} and {step}"
        survived = max((r.steps.get(pid, 0) for r in known), default=0)
        assert step >= survived, f"round {round_id} begins at step {step}; process {pid} had done {survived}"
        by_all = max((r.done_by_all for r in known), default=0)
        assert step >= by_all, f"round {round_id} begins at step {step}; all ranks had done {by_all}"
        last = max((max(r.steps.values(), default=0) for r in known), default=0)
        assert last - 1 <= step <= last + 1, f"round {round_id} begins at step {step}; the last one was {last}"
        if not found.processes:
            self.repeated += step < last
            self.unrecorded |= {step} - {0, *self.gradients}
        found.processes[rank] = pid
        found.steps[pid] = step

    def _step(self, round_id: str, pid: int, step: int, gradient: float, moment: float) -> None:
        found = self.rounds[round_id]
        assert step == found.steps[pid] + 1, f"process {pid} did step {step} after {found.steps[pid]}"
        found.steps[pid], found.last_times[pid] = step, moment
        found.first_step_time = found.first_step_time or moment
        _same(self.gradients, step, gradient, f"gradient of step {step} in round {round_id}")


def _same(known: dict[int, float], key: int, value: float, what: str) -> None:
    difference = abs(known.setdefault(key, value) - value)
    assert difference <= TOLERANCE, f"{what} differs by {difference}"

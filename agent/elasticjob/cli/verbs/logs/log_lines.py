"""Which lines of a pod's log are shown, and how. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elasticjob.cli.objects.pods import formed_round, line_rank
from elasticjob.cli.views.style import Painter

_AGENT = "[agent] "


@dataclass(frozen=True)
class LogChoice:
    """What a person wants to see of the logs."""

    ranks: Collection[int] = ()
    """Only lines of these ranks; empty: all lines."""
    round: str = ""
    """Only lines of this round, such as `1.0.3` or `3`; empty: of all rounds."""
    timestamps: bool = False

    def has_round(self, round_id: str) -> bool:
        return round_id == self.round or round_id.rpartition(".")[2] == self.round


class PodLines:
    """The lines of one pod's log, in order. `role`: torch's role of its workers; empty: `default`."""

    def __init__(self, choice: LogChoice, role: str, painter: Painter) -> None:
        self._choice = choice
        self._role = role
        self._painter = painter
        self._round = ""
        self.shown = 0

    def shown_line(self, time: str, line: str) -> str | None:
        """Return the next line as it is shown; None if it is not."""
        if (formed := formed_round(line)) is not None:
            self._round = formed[0]
        rank = line_rank(line, self._role)
        if self._choice.round and not self._choice.has_round(self._round):
            return None
        if self._choice.ranks and rank not in self._choice.ranks:
            return None
        self.shown += 1
        text = self._painted(line, rank)
        return f"{time} {text}" if self._choice.timestamps else text

    def _painted(self, line: str, rank: int | None) -> str:
        if rank is not None:
            prefix, bracket, text = line.partition("]:")
            return self._painter.of_rank(prefix + bracket, rank) + text
        return self._painter.paint(line, "dim") if line.startswith(_AGENT) else line

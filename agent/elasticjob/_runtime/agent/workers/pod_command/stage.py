"""The launcher in a pod's command that waits for its ranks."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticjob._runtime.agent.reporting.worker_output import DescriptorSink
from elasticjob._runtime.agent.start_workers.command import PythonCommand
from elasticjob._runtime.agent.start_workers.launches.pending_launch import Launch
from elasticjob._runtime.agent.start_workers.shims.shim_callers import process_attributes
from elasticjob._runtime.agent.workers.worker import EndedWorker
from elasticjob._runtime.contract.text import printable

TWO_AT_ONCE = "two launchers run in this command at the same time, and both would train: start one after the other"
OTHER_ATTRIBUTES = (
    "a launcher that follows another one has other users, priority, processors or namespaces: the agent cannot start"
    " its ranks with them"
)
RANK_WITHOUT_LAUNCHER = (
    "a process of this command forms a process group as a rank, but the command runs once in its pod because it has"
    " started a launcher: start what trains by a launcher too, such as torchrun"
)


MAX_TARGET = 200
"""Characters of a script's path, from its end, that are kept."""


@dataclass
class Stage:
    """The launcher that waits."""

    launch: Launch
    code: asyncio.Future[int]
    exit_code: int = 0
    signalled: bool = False
    """Whether the launcher got a signal that ends its ranks."""
    over: bool = False
    """Whether all ranks have ended, and the launcher waits for those of the other pods."""
    lost: bool = False
    """Whether the launcher has ended."""
    broken: bool = True
    """Whether no rank has started in this round yet, one has failed or stopped as planned, or all of them were stopped:
    the stage is not over, although none runs."""

    def rank_ended(self, ended: EndedWorker, code: int) -> list[EndedWorker]:
        """Return what the end of a rank means for the round; `code` is its exit code."""
        if self.signalled and not ended.as_planned:
            self.exit_code = self.exit_code or code
            return []
        if ended.failure is None and not ended.as_planned:
            return []
        self.broken = True
        return [ended]

    async def answer(self, outputs: Iterable[DescriptorSink], code: int | None) -> None:
        """Give the launcher the exit code, if there is one, once what its ranks have written to `outputs` is out."""
        await asyncio.gather(*(asyncio.to_thread(sink.close, 5.0) for sink in outputs))
        self.launch.close()
        if code is not None:
            self.code.set_result(code)


def has_own_attributes(launch: Launch) -> bool:
    """Return whether the agent cannot start ranks that are like the launcher, because it has other attributes."""
    return launch.caller.process_attributes != process_attributes(os.getpid())


def launcher_name(launch: Launch) -> str:
    """Return what a launcher runs, as in `StageBegan`."""
    command = launch.command
    target = command.target if isinstance(command, PythonCommand) else command.argv[0]
    words = "\0".join(command.argv).encode(errors="surrogateescape")
    return f"{printable(target)[-MAX_TARGET:]} {hashlib.sha256(words).hexdigest()[:12]}"


def stage_of(name: str, passed: int, finished: int, launchers: Sequence[str]) -> int:
    """Return the number of a launcher that the command has reached after `passed` stages; more stages may be over.

    `launchers` has the names so far; the first `finished` ones are over. The command may have skipped some of these
    by itself. Words may differ from pod to pod, and from one run to the next, such as a date, so the same script stands
    for the same stage unless another launcher has exactly these words.
    """
    over = list(enumerate(launchers[:finished], start=1))[passed:]
    if passed >= finished or not over:  # without names the number has to tell
        return passed + 1
    if same := [stage for stage, known in over if known == name]:
        return same[0]
    target, is_present = name.rpartition(" ")[0], name in launchers[finished:]
    if not is_present and (alike := [stage for stage, known in over if known.rpartition(" ")[0] == target]):
        return alike[0]
    return finished + 1


class FinishedStages:
    """How many launchers of the command are finished in all pods, as far as this pod has been told."""

    def __init__(self) -> None:
        self.number = 0
        self.launchers: tuple[str, ...] = ()
        """As in `StartRound`."""
        self._changed = asyncio.Event()
        self._released = False

    def add(self, number: int, launchers: tuple[str, ...] = ()) -> None:
        """Record what the coordinator has named; it only grows."""
        self.number, self.launchers = max(self.number, number), max(self.launchers, launchers, key=len)
        self._changed.set()

    def stage_of(self, name: str, passed: int) -> int:
        """As `stage_of`, with what is known."""
        return stage_of(name, passed, self.number, self.launchers)

    def release(self) -> None:
        """Let what waits go on: its command has ended."""
        self._released = True
        self._changed.set()

    async def until(self, number: int) -> None:
        """Wait until so many launchers are finished, or the command has ended."""
        self._released = False
        while self.number < number and not self._released:
            self._changed.clear()
            await self._changed.wait()

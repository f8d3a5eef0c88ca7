"""`elasticjob agent -- COMMAND...`. As PID 1 of a container, signals must be caught before anything else is done."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(command: Sequence[str]) -> int:
    """Run one agent with the user's command; its exit code."""
    early: list[str] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        early.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    return _run(command, early)


def _run(command: Sequence[str], early: Sequence[str]) -> int:
    import asyncio
    import contextlib
    import traceback

    from elasticjob.agent.callers import torchrun_python
    from elasticjob.agent.command import read_command
    from elasticjob.agent.config import UsageError, read_config
    from elasticjob.agent.runner import Agent
    from elasticjob.agent.termination import write_termination
    from elasticjob.contract.messages import Outcome, Termination
    from elasticjob.contract.names import ExitCode

    try:
        config = read_config(os.environ)
    except UsageError as error:
        print(f"elasticjob agent: {error}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        return asyncio.run(Agent(config, read_command(command, torchrun_python(command[0])), early).run())
    except Exception as error:
        # Python's own exit code for this would be 1: what a job that failed ends with.
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_termination(config.termination_log, Termination(Outcome.ERROR, "AgentBroke", message=message))
        return ExitCode.INTERNAL

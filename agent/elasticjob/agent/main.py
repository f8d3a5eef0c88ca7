"""`elasticjob agent -- COMMAND...`. As PID 1 of a container, signals must be caught before anything else is done."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Torchrun's own, and what an image's STOPSIGNAL may be; TORCHELASTIC_SIGNALS_TO_HANDLE names others."""


def main(command: Sequence[str]) -> int:
    """Run one agent with the user's command; its exit code."""
    early: list[str] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        early.append(signal.Signals(number).name)

    handled = [s for s in signals(os.environ) if signal.getsignal(s) is not signal.SIG_IGN]  # as under nohup
    for number in handled:
        signal.signal(number, remember)
    return _run(command, early, handled)


def signals(env: Mapping[str, str]) -> list[signal.Signals]:
    """Those on which an agent leaves, and which its workers get."""
    names = env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS).split(",")
    return [number for number in signal.Signals if number.name in names and number not in _NOT_CAUGHT]


_NOT_CAUGHT = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def _run(command: Sequence[str], early: Sequence[str], handled: Sequence[signal.Signals]) -> int:
    import asyncio
    import contextlib
    import traceback

    from elasticjob.agent.config import UsageError, read_config
    from elasticjob.agent.reporting.termination_message import write_termination
    from elasticjob.agent.runner import Agent
    from elasticjob.agent.start_workers.command import parse_command, parse_own_agent_command, torchrun_options
    from elasticjob.agent.start_workers.shim_callers import torchrun_interpreter
    from elasticjob.contract.messages import Outcome, Termination
    from elasticjob.contract.names import Backend, ExitCode

    try:
        config = read_config(os.environ, torchrun_options(command))
    except UsageError as error:
        print(f"elasticjob agent: {error}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        read = parse_own_agent_command if config.backend is Backend.C10D else parse_command
        program = read(command, torchrun_interpreter(command[0]))
        return asyncio.run(Agent(config, program, early, handled).run())
    except Exception as error:
        # Python's own exit code for this would be 1: what a job that failed ends with.
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_termination(config.termination_log, Termination(Outcome.ERROR, "AgentBroke", message=message))
        return ExitCode.INTERNAL

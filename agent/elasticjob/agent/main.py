"""`elasticjob agent -- COMMAND...`.

The agent may be PID 1 of a container, and PID 1 ignores every signal without a handler: it installs its handlers first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default; it covers the usual STOPSIGNAL of images. TORCHELASTIC_SIGNALS_TO_HANDLE overrides it."""
_NOT_CAUGHT = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def main(command: Sequence[str]) -> int:
    """Run one agent with the user's command and return its exit code."""
    early: list[str] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        early.append(signal.Signals(number).name)

    # A signal that is ignored already stays ignored (nohup).
    handled = [s for s in signals(os.environ) if signal.getsignal(s) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, remember)
    return _run(command, early, handled)


def signals(env: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals on which an agent leaves. The agent sends its workers the same signal."""
    names = env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS).split(",")
    return [number for number in signal.Signals if number.name in names and number not in _NOT_CAUGHT]


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
        parse = parse_own_agent_command if config.backend is Backend.C10D else parse_command
        program = parse(command, torchrun_interpreter(command[0]))
        return asyncio.run(Agent(config, program, early, handled).run())
    except Exception as error:
        # Python's own exit code would be 1, which is the code of a failed job.
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_termination(config.termination_log, Termination(Outcome.ERROR, "AgentBroke", message=message))
        return ExitCode.INTERNAL

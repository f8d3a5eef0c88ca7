"""`elasticjob agent -- COMMAND...`.

The agent may be PID 1 of a container. PID 1 ignores every signal that has no handler, so the agent installs
its handlers before it imports anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from elasticjob._runtime.system.early_signals import install_handler, record_signals

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default, which includes the usual STOPSIGNAL of images. TORCHELASTIC_SIGNALS_TO_HANDLE overrides it."""
_UNHANDLED = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def main(command: Sequence[str]) -> int:
    """Run one agent with the user's command, and end the process with its exit code.

    Return an exit code if the agent does not start, or fails by an error of its own.
    """
    return _run(command, *record_signals(signals(os.environ)))


def _replace_handled(handled: Sequence[signal.Signals], names: str) -> list[signal.Signals]:
    """Handle the signals in torchrun's --signals-to-handle instead of `handled`, with the same handler."""
    wanted = signals({"TORCHELASTIC_SIGNALS_TO_HANDLE": names})
    handler = signal.getsignal(handled[0]) if handled else signal.SIG_DFL
    for number in set(handled) - set(wanted):
        signal.signal(number, signal.SIG_DFL)
    return install_handler(wanted, handler) if callable(handler) else list(wanted)


def signals(env: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals on which an agent leaves. The agent sends its workers the same signal."""
    names = [name.strip() for name in env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS).split(",")]  # as torch does
    return [number for number in signal.Signals if number.name in names and number not in _UNHANDLED]


def _run(command: Sequence[str], early: Sequence[str], handled: Sequence[signal.Signals]) -> int:
    import traceback
    from dataclasses import replace

    try:
        from elasticjob._runtime.agent.config import UsageError, read_config, read_options
        from elasticjob._runtime.agent.runner import Agent
        from elasticjob._runtime.agent.shipped_code import CodeError, ShippedCode
        from elasticjob._runtime.agent.start_workers.command import CommandError, parse_command, parse_own_agent_command
        from elasticjob._runtime.agent.start_workers.shims.shim_callers import torchrun_interpreter
        from elasticjob._runtime.contract.names import Backend, ExitCode
        from elasticjob._runtime.system.daemon_threads import run_without_joining
        from elasticjob._runtime.system.process_end import end_without_destructors
    except ImportError as error:
        return _refuse(f"{sys.executable} lacks what the agent needs: {error}: use an image with a complete Python")
    try:
        code = ShippedCode()
        code.unpack()
        options = read_options(os.environ, command)
        config = replace(read_config(os.environ, options), code=code)
        if names := options.get("signals-to-handle"):
            handled = _replace_handled(handled, names)
        parse = parse_own_agent_command if config.backend is Backend.C10D else parse_command
        agent = Agent(config, parse(command, torchrun_interpreter(command[0]), os.environ), early, handled)
    except (UsageError, CommandError, CodeError) as error:
        return _refuse(str(error))
    except Exception as error:
        # So far everything depends only on the image, the flags and the variables: another attempt would fail as well.
        traceback.print_exc()
        return _refuse(f"{type(error).__name__}: {error}")
    try:
        # Python's finalization would use processors that other workers on this Node may need for their next round now.
        end_without_destructors(run_without_joining(agent.run()))
    except Exception as error:
        # Python itself would exit with 1, which is the exit code of a failed job.
        traceback.print_exc()
        _write_error("AgentBroke", f"{type(error).__name__}: {error}")
        return ExitCode.INTERNAL


def _refuse(message: str) -> int:
    """Print and record why the agent does not start; return the exit code of a usage error."""
    from elasticjob._runtime.contract.names import ExitCode

    print(f"elasticjob agent: {message}", file=sys.stderr)
    _write_error("UsageError", message)
    return ExitCode.USAGE


def _write_error(reason: str, message: str) -> None:
    import contextlib

    with contextlib.suppress(OSError, ImportError):
        from elasticjob._runtime.agent.reporting.termination_message import (
            TERMINATION_LOG,
            read_round,
            write_termination,
        )
        from elasticjob._runtime.contract.messages import Outcome, Termination
        from elasticjob._runtime.contract.names import Env

        path = os.environ.get(Env.TERMINATION_LOG) or TERMINATION_LOG
        write_termination(path, Termination(Outcome.ERROR, reason, read_round(path), message))

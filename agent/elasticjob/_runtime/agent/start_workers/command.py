"""Parse the user's command line: Python that the fork server can run, torchrun, or another program. Pure.

`torchrun [options] script args` means: run the script under this agent, as torchrun would have started it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticjob._runtime.contract.commands.launchers import find_refused_launcher
from elasticjob._runtime.contract.commands.python_command import (
    PlainCommand,
    ProgramMode,
    PythonCommand,
    UserCommand,
    base_name,
    command_without_script,
    is_python,
    parse_python_command,
    with_local_rank,
)
from elasticjob._runtime.contract.commands.torchrun_command import (
    NPROC_PER_NODE,
    TORCHRUN_MODULES,
    TORCHRUN_OPTIONS,
    CommandError,
    TorchrunCommand,
    check_options,
    is_torchrun,
    parse_torchrun,
    torchrun_call,
)
from elasticjob._runtime.contract.text import with_noun

__all__ = [
    "PYTHON_EXEC",
    "TORCHRUN_MODULES",
    "CommandError",
    "PlainCommand",
    "ProgramMode",
    "PythonCommand",
    "UserCommand",
    "is_torchrun",
    "lost_log_options",
    "parse_command",
    "parse_own_agent_command",
    "parse_shell_command",
    "parse_shell_launch",
    "shell_log_options",
    "shell_role",
    "torchrun_options",
    "with_local_rank",
    "without_effect",
]

PYTHON_EXEC = "PYTHON_EXEC"
"""torchrun's variable for the interpreter of its workers."""
_LOG_OPTIONS = ("log-dir", "redirects", "tee", "local-ranks-filter", "log-line-prefix-template")
_PRINT_ERROR = """
import json, os, sys
path, text = os.environ.get("TORCHELASTIC_ERROR_FILE"), "RefusedCommandError: " + sys.argv[1]
if path:
    with open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": {"py_callstack": text}}}, file)
sys.exit(sys.argv[1])
"""


def parse_command(
    argv: Sequence[str], torchrun_python: str = "python3", env: Mapping[str, str] | None = None
) -> UserCommand:
    """Return the command of each worker; CommandError if it is a launcher that elasticjob does not run, or if
    torchrun's options are wrong or not supported.

    `torchrun_python` is the interpreter of this image's `torchrun`, `env` has torchrun's PET_ variables.
    """
    if refused := find_refused_launcher(argv):
        raise CommandError(refused)
    call = torchrun_call(argv)
    if call is not None:
        command, is_launch, arguments = call
        if not arguments:
            return command_without_script(argv)
        parsed = parse_torchrun(arguments, env or {}, is_launch=is_launch)
        check_options(parsed.options)
        python = (env or {}).get(PYTHON_EXEC) or (command.interpreter if command else torchrun_python)
        return _torchrun_program(parsed, python, (*(command.flags if command else ()), "-u"))
    return parse_python_command(argv) if is_python(argv[0]) else _not_python(argv)


def _torchrun_program(parsed: TorchrunCommand, python: str, flags: tuple[str, ...]) -> UserCommand:
    """Return the program that torchrun would start."""
    has_macros = any("$" in argument for argument in (parsed.program, *parsed.args))
    if "no-python" in parsed.options and "run-path" not in parsed.options:
        return PlainCommand((parsed.program, *parsed.args), "torchrun --no-python", has_macros=has_macros)
    is_module = "module" in parsed.options and "run-path" not in parsed.options
    mode = ProgramMode.MODULE if is_module else ProgramMode.SCRIPT
    return PythonCommand(python, flags, mode, parsed.program, parsed.args, has_macros)


def parse_shell_command(argv: Sequence[str], torchrun_python: str, env: Mapping[str, str]) -> UserCommand:
    """Return the command of a process inside a worker whose environment is `env`.

    If torchrun's options are wrong or not supported, or ask for another number of workers than the pod runs, the
    command prints the reason and fails.
    """
    try:
        command = parse_command(argv, torchrun_python, env)
        _check_workers(torchrun_options(argv, env).get(NPROC_PER_NODE, ""), env.get("LOCAL_WORLD_SIZE", ""))
    except CommandError as error:
        call = torchrun_call(argv)
        python = call[0].interpreter if call and call[0] else torchrun_python
        return PythonCommand(python, (), ProgramMode.CODE, _PRINT_ERROR, (str(error),))
    return with_local_rank(command, env.get("LOCAL_RANK", "0"))


def shell_role(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the role that a torchrun inside of a worker names, for ROLE_NAME; empty if it names none."""
    try:
        return torchrun_options(argv, env).get("role", "")
    except CommandError:
        return ""


def parse_shell_launch(argv: Sequence[str], torchrun_python: str, env: Mapping[str, str]) -> UserCommand | None:
    """Return what a torchrun in a pod's command runs as its ranks, with its macros; None if this is not a torchrun.

    CommandError: its options are wrong or not supported, or ask for another number of workers than the pod runs.
    """
    call = torchrun_call(argv)
    if call is None or not call[2]:
        return None
    command = parse_command(argv, torchrun_python, env)
    _check_workers(torchrun_options(argv, env).get(NPROC_PER_NODE, ""), env.get("LOCAL_WORLD_SIZE", ""))
    return command


def shell_log_options(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the options of logs that a torchrun inside of a worker has, by long names; {} without any."""
    try:
        options = torchrun_options(argv, env)
    except CommandError:
        return {}
    return {name: options[name] for name in _LOG_OPTIONS if options.get(name)}


def without_effect(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a line about the options without effect of a torchrun in a pod's command; empty if it has none."""
    try:
        return check_options(torchrun_options(argv, env))
    except CommandError:
        return ""


def lost_log_options(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a line about the options of logs of a torchrun that becomes a rank in a shell; empty if it has none.

    The worker's output is connected when its program starts. Options that the pod template has as variables count.
    """
    variables = [TORCHRUN_OPTIONS[name].variable for name in shell_log_options(argv, {})]
    missing = [name for name in variables if not env.get(name)]
    if not missing:
        return ""
    return f"torchrun's options of logs have no effect inside a shell: set {', '.join(missing)} in the pod template"


def _check_workers(asked: str, running: str) -> None:
    if asked.isdigit() and running.isdigit() and int(asked) != int(running):
        raise CommandError(
            f"torchrun --nproc-per-node={asked} inside a shell: this pod runs {with_noun(int(running), 'worker')},"
            f" because the shell hides the number; set spec.nprocPerNode: {int(asked)}"
        )


def parse_own_agent_command(
    argv: Sequence[str], torchrun_python: str = "python3", env: Mapping[str, str] | None = None
) -> UserCommand:
    """Return the command to run once in a pod whose command is an elastic agent itself, such as torchrun.

    It reads its variables in `env` itself.
    """
    del env
    if base_name(argv[0]) == "torchrun":
        return PythonCommand(torchrun_python, ("-u",), ProgramMode.MODULE, TORCHRUN_MODULES[0], tuple(argv[1:]))
    return parse_python_command(argv) if is_python(argv[0]) else _not_python(argv)


def _not_python(argv: Sequence[str]) -> PlainCommand:
    return PlainCommand(tuple(argv), f"{base_name(argv[0])} is not Python")


def torchrun_options(argv: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the torchrun options of a command by their long names, with those that `env` sets by PET_ variables.

    The value of a switch is empty. Without torchrun, or without arguments for it: {}.
    """
    call = torchrun_call(argv)
    if call is None or not call[2]:
        return {}
    return dict(parse_torchrun(call[2], env or {}, is_launch=call[1]).options)

"""Find out before any pod starts that the program of a job does not exist: no restart can mend that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.shims.shim_callers import torchrun_interpreter
from elasticjob._runtime.contract.commands.python_command import ProgramMode, PythonCommand
from elasticjob._runtime.contract.commands.torchrun_command import CommandError
from elasticjob._runtime.system.code_root import CODE_ROOT

_MODULE_TIMEOUT = 30.0
"""Seconds. An interpreter that takes longer to find a module is not a reason to refuse the job."""
_MISSING = 3
_FIND_MODULE = f"""
import importlib.util, sys
name = sys.argv[1]
try:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
except ModuleNotFoundError as error:
    if error.name is None or not (name + ".").startswith(error.name + "."):
        sys.exit(0)  # the module exists, and imports another one that does not
    name, spec = error.name, None
except BaseException:
    sys.exit(0)
if spec is None:
    print(name)
    sys.exit({_MISSING})
"""
"""As `runpy` finds the module of -m. Packages around the module are imported, as they are by Python itself."""


def find_missing_program(argv: Sequence[str], env: Mapping[str, str], directory: str | None) -> str:
    """Return what the command names and this machine does not have or may not read; empty if there is nothing.

    `env`: the environment of the command. `directory`: the manifest's workingDir. Arguments of other programs, such as
    the text of `sh -c`, are not examined.
    """
    folder = Path(directory or ".").absolute()
    if not folder.is_dir():
        return f"workingDir: {folder} is not a directory of this machine"
    try:
        command = parse_command(argv, torchrun_interpreter(argv[0]), env)
    except CommandError:
        return ""  # the agent says what is wrong with it
    problem = _program_problem(argv[0], env, folder)
    if problem or not isinstance(command, PythonCommand) or command.has_macros:
        return problem
    if command.mode is ProgramMode.SCRIPT:
        return _script_problem(folder / command.target)
    return _module_problem(command, env, folder) if command.mode is ProgramMode.MODULE else ""


def _program_problem(program: str, env: Mapping[str, str], folder: Path) -> str:
    if "/" not in program:
        found = shutil.which(program, path=env.get("PATH", os.defpath))
        return "" if found else f"{program}: no such program on PATH"
    path = folder / program
    if not path.is_file():
        return f"{path}: no such file"
    executable = path.stat().st_mode & 0o111  # not by access(2), which ignores capabilities
    return "" if executable else f"{path}: permission denied: it is not executable"


def _script_problem(path: Path) -> str:
    """Return why Python cannot run the path: a file, or a folder with a `__main__.py`."""
    try:
        is_folder = path.is_dir()
        if is_folder and not (path / "__main__.py").exists():
            return f"{path}: is a directory without __main__.py"
        if not path.exists():
            return f"{path}: no such file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        if path.is_file():
            path.open("rb").close()
    except OSError as error:
        return f"{path}: {(error.strerror or str(error)).lower()}"
    return ""


def _module_problem(command: PythonCommand, env: Mapping[str, str], folder: Path) -> str:
    search = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), CODE_ROOT])
    try:
        done = subprocess.run(
            [command.interpreter, *command.flags, "-c", _FIND_MODULE, command.target],
            env={**env, "PYTHONPATH": search},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MODULE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != _MISSING:
        return ""
    return f"no module named {done.stdout.strip()!r}, for {command.interpreter} -m {command.target} in {folder}"

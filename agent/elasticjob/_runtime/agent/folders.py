"""Folders for temporary files, also in a pod whose root file system is read-only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.memory_file import SHARED_MEMORY

MAX_PATH = 75
"""Longest path of the folder in bytes. The Unix sockets below it have up to 32 more, and Linux allows 107."""


@dataclass(frozen=True)
class NodeFolders:
    """Writable folders of this pod."""

    scratch: str
    """For the agent's own files, which are small."""
    temporary: str | None
    """The folder that Python's `tempfile` chooses; None if it finds none."""
    working_dir: str = field(default="", compare=False)

    @property
    def home_parent(self) -> str:
        """Where a missing home directory is created. Not in the working directory, which several pods may share."""
        return self.scratch if self.temporary in (None, self.working_dir) else self.temporary

    @property
    def worker_env(self) -> dict[str, str]:
        """TMPDIR, if programs would find no temporary folder without it."""
        return {} if self.temporary else {"TMPDIR": self.scratch}


def find_folders(env: Mapping[str, str], code_root: str) -> NodeFolders | None:
    """Return the folders that this process can write to; None if there is none. `code_root`: where our code is."""
    try:
        working_dir = os.getcwd()  # noqa: PTH109
    except OSError:
        working_dir = os.curdir
    usual = temporary_folders(env, working_dir)
    given = [os.path.join(working_dir, env[Env.SCRATCH_DIR])] if env.get(Env.SCRATCH_DIR) else []  # noqa: PTH118
    scratch = first_writable(scratch_folders((*given, *usual), code_root))
    return NodeFolders(scratch, first_writable(usual), usual[-1]) if scratch else None


def temporary_folders(env: Mapping[str, str], working_dir: str) -> tuple[str, ...]:
    """Return the folders that Python's `tempfile` tries, in its order. The working directory is the last one."""
    named = [env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)]
    usual = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108
    return tuple(os.path.join(working_dir, path) for path in (*named, *usual, working_dir))  # noqa: PTH118


def scratch_folders(temporary: tuple[str, ...], code_root: str) -> tuple[str, ...]:
    """Return the folders that may hold the agent's own files, in the order of preference.

    The working directory comes last: it is often on a network file system, where Unix sockets may fail.
    """
    *usual, working_dir = temporary
    mounted = [SHARED_MEMORY, *([os.path.dirname(code_root)] if code_root.endswith(".pyz") else [])]  # noqa: PTH120
    return tuple(path for path in (*usual, *mounted, working_dir) if len(os.fsencode(path)) <= MAX_PATH)


def first_writable(folders: Iterable[str]) -> str | None:
    """Return the first folder in which a file can be written, None if there is none."""
    return next(filter(_is_writable, folders), None)


def _is_writable(folder: str) -> bool:
    # os.access does not detect a full disk.
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0")
    except OSError:
        return False
    return True

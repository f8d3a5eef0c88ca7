"""HOME and USER of workers whose user the image does not know, such as one of a range that OpenShift assigns.

The container runtime gives such a user the home directory `/`, where it may not write, and it has no name. Caches below
the home directory (Triton's, Hugging Face's) then fail, and so does `getpass.getuser()`, which torch's inductor calls
to name its own cache.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path

_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The variables that `getpass.getuser` reads before it asks for the user's entry in /etc/passwd."""


def home_variables(env: Mapping[str, str], parent: str) -> dict[str, str]:
    """Return the variables that a worker lacks: HOME with a new folder in `parent`, USER with the user's number.

    A home directory of the image stays even if it is read-only: it may have packages, credentials and caches that the
    script reads. So HOME changes only where it is unset, names no directory, or is a `/` that this user may not write.
    """
    found = {}
    home = env.get("HOME", "")
    if not os.path.isdir(home or "/none") or (home == "/" and not os.access(home, os.W_OK)):  # noqa: PTH112
        found["HOME"] = _create_home(parent)
    if not any(env.get(name) for name in _USER_VARIABLES) and not _has_name(os.getuid()):
        found["USER"] = str(os.getuid())
    return found


def _create_home(parent: str) -> str:
    """Return a folder of this user in `parent`: the one of an earlier agent, else a new one."""
    usual = Path(parent, f"elasticjob-home-{os.getuid()}")
    try:
        usual.mkdir(mode=0o700, exist_ok=True)
        if usual.lstat().st_uid == os.getuid() and not usual.is_symlink():
            return str(usual)
    except FileExistsError:
        pass
    return tempfile.mkdtemp(prefix=f"{usual.name}-", dir=parent)


def _has_name(uid: int) -> bool:
    try:
        return bool(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return False

"""A stand-in for pip: the environment of the tests has the packages already. It knows the names of the extras."""

from __future__ import annotations

from pathlib import Path

import tomllib

from support.cluster.kubectl import REPOSITORY
from support.docs.shell import stand_in

EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PIP = f"""#!/bin/bash
[[ "$1" = install && "$2" =~ ^\\.\\[([a-z,]+)\\]$ ]] || {{ echo "unexpected: pip $*"; exit 1; }}
for extra in ${{BASH_REMATCH[1]//,/ }}; do
    [[ " {" ".join(EXTRAS)} " = *" $extra "* ]] || {{ echo "no extra $extra"; exit 1; }}
done
"""


def pip_stand_in(folder: Path) -> None:
    """Write a program `pip` that accepts `pip install '.[EXTRAS]'` for extras that exist, and installs nothing."""
    stand_in(folder, "pip", PIP)

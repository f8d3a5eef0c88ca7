"""The shell blocks of the documentation that need no cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tomllib

from support.cluster.kubectl import REPOSITORY
from support.docs.blocks import Block, blocks_to_run
from support.docs.shell import Shell, stand_in

EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PIP = f"""#!/bin/bash
[[ "$1" = install && "$2" =~ ^\\.\\[([a-z,]+)\\]$ ]] || {{ echo "unexpected: pip $*"; exit 1; }}
for extra in ${{BASH_REMATCH[1]//,/ }}; do
    [[ " {" ".join(EXTRAS)} " = *" $extra "* ]] || {{ echo "no extra $extra"; exit 1; }}
done
"""
"""A stand-in for pip: this environment has the packages already. It knows the names of the extras."""


BLOCKS = {re.sub(r" +# .*", "", block.text): block for block in blocks_to_run("local")}
"""By their commands: two pages have the same ones, and the last page shows the output."""


@pytest.mark.parametrize("block", BLOCKS.values(), ids=str)
def test_a_local_block_runs(block: Block, tmp_path: Path) -> None:
    stand_in(tmp_path, "pip", PIP)
    shell = Shell(REPOSITORY, [tmp_path, Path(sys.executable).parent], {"TMPDIR": str(tmp_path)})
    shell.run(block)

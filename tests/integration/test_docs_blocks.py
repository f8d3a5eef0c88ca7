"""The shell blocks of the documentation that need no cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.cluster.kubectl import REPOSITORY
from support.docs.blocks import Block, blocks_to_run
from support.docs.pip import pip_stand_in
from support.docs.shell import Shell

BLOCKS = {re.sub(r" +# .*", "", block.text): block for block in blocks_to_run("local")}
"""By their commands: two pages have the same ones, and the last page shows the output."""


@pytest.mark.parametrize("block", BLOCKS.values(), ids=str)
def test_a_local_block_runs(block: Block, tmp_path: Path) -> None:
    pip_stand_in(tmp_path)
    shell = Shell(REPOSITORY, [tmp_path, Path(sys.executable).parent], {"TMPDIR": str(tmp_path)})
    shell.run(block)

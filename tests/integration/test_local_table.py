"""`elasticjob run` on a terminal: the live table, and the keys that kill nodes and scale the job."""

from __future__ import annotations

import sys
import termios
from pathlib import Path
from typing import Any

from support.local.run import manifest
from support.local.terminal import Terminal

WAIT = """
import os, sys, time
print("started", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def waiting(folder: Path, **spec: Any) -> Terminal:
    """Start a run whose workers wait for the file `done`."""
    (folder / "wait.py").write_text(WAIT)
    return Terminal(folder, manifest([sys.executable, str(folder / "wait.py"), str(folder / "done")], **spec))


def test_a_table_shows_the_nodes_and_keys_kill_and_scale(tmp_path: Path) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 3}
    with waiting(tmp_path, replicas=2, elasticPolicy=policy) as terminal:
        terminal.wait_for(r"toy: Running +2 of 2 pods, 2 workers +round 1\.0\.1 +restarts 0")
        terminal.wait_for(r"1 +toy-1-0 +\d+ +in the round")
        terminal.press("1")
        terminal.wait_for("toy-1-0 ended .SIGKILL.; toy-1-1 takes its place")
        terminal.wait_for(r"toy: Running +2 of 2 pods")
        terminal.press("+")
        terminal.wait_for(r"started \d of 3")
        terminal.wait_for(r"toy: Running +3 of 3 pods")
        terminal.press("-")
        terminal.wait_for(r"toy: Running +2 of 2 pods, 2 workers")
        terminal.press("s")
        terminal.wait_for("the store ended .SIGKILL.; starting it again")
        (tmp_path / "done").touch()
        terminal.wait_for("toy succeeded; 0 restarts")
        assert terminal.exit_code() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_ctrl_c_once_drains(tmp_path: Path) -> None:
    with waiting(tmp_path, replicas=2) as terminal:
        terminal.wait_for("started 1 of 2")
        terminal.interrupt()
        terminal.wait_for("interrupted: draining the pods; interrupt again to kill them")
        terminal.wait_for("toy was interrupted")
        assert terminal.exit_code() == 130
        assert termios.tcgetattr(terminal.theirs) == terminal.before

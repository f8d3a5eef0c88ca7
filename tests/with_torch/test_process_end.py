"""What runs at the end of a worker's process, and what of torch is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ENDS = """
import atexit, logging, os, sys, weakref
import torch._dynamo
from elasticjob._runtime.system.process_end import end_at_once

torch.library._del_library = lambda *_: print("operators taken back")
torch.library._del_library.__module__ = "torch.library"

class Kept:
    pass

library, kept = torch.library.Library("own_operators", "DEF"), Kept()
weakref.finalize(kept, print, "the script's finalizer")
weakref.finalize(kept, (1).__add__, 1)  # without __module__
atexit.register(print, "the script's exit function")
for name in sys.argv[1:]:  # the import takes seconds: one process for each case begins after it
    if os.fork() == 0:
        for descriptor, output in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{output}", os.O_CREAT | os.O_WRONLY), descriptor)
        if name == "table":
            torch._logging.set_logs(dynamo=logging.INFO)
        end_at_once(3)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
os._exit(0)
"""


def test_the_scripts_exit_functions_run_and_not_those_of_torch_that_show_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, "table", "plain"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for name in ("table", "plain"):
        printed = (tmp_path / f"{name}.out").read_text().splitlines()
        assert sorted(printed) == ["the script's exit function", "the script's finalizer"]
        assert ("compilation metrics" in (tmp_path / f"{name}.err").read_text()) is (name == "table")

"""What runs at the end of a worker's process, and what of torch is left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

ENDS = """
import atexit, logging, sys, weakref
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
if "table" in sys.argv:
    torch._logging.set_logs(dynamo=logging.INFO)
end_at_once(3)
"""


@pytest.mark.parametrize("table", [True, False])
def test_the_scripts_exit_functions_run_and_not_those_of_torch_that_show_nothing(table: bool) -> None:
    arguments = ["table"] if table else []
    ended = subprocess.run([sys.executable, "-c", ENDS, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["the script's exit function", "the script's finalizer"]
    assert ("compilation metrics" in ended.stderr) is table

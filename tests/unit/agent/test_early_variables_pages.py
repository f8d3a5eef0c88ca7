"""The watch for early variables in a fork leaves the pages of the fork server's module names shared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import elasticjob

PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(elasticjob.__file__).parents[1])!r})
import gc, os, resource, types
from elasticjob._runtime.agent.start_workers.fork_server.early_variables import (
    PreloadRecord, ProcessStart, watch_early_variables,
)

# Some MB of names: each takes 5000 bytes, so that most are in a page of their own.
sys.modules.update((f"module{{number:05}}" + "x" * 5000, types.ModuleType("m")) for number in range(1000))
record = PreloadRecord({{f"VARIABLE_{{number}}" + "x" * 5000 for number in range(1000)}})
record.note_modules()
gc.collect()
gc.freeze()
if os.fork() == 0:
    sys.modules["late"] = types.ModuleType("late")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    watch_early_variables(record, frozenset({{"torch"}}), ProcessStart([], {{}}, "/"))
    os.write(1, str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before).encode())
    os._exit(0)
os.wait()
"""


def test_a_fork_copies_no_page_of_the_names_that_the_fork_server_knows() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert int(result.stdout) < 500
